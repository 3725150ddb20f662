"""What integrations have in common: an engine's keys and pages, told as our namespaces, hashes and clients."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvstore.errors import InvalidArgumentError
from kvstore.keys import HASH_BYTES, BlockHash
from kvstore.layout import DTYPE_BYTES
from kvstore.namespace import NONE, Namespace, Shard
from kvstore_client.address import parse_address
from kvstore_client.client import Client
from kvstore_client.config import TRANSPORTS, ClientConfig
from kvstore_client.integrations._identity import position_settings

TOKEN_IDS_ONLY = "token-ids"  # noqa: S105  (not that kind of token)
"""As `Namespace.tokenizer`: blocks depend on the ids, not on their spelling."""

_HEX_HASH = re.compile(f"[0-9a-fA-F]{{{2 * HASH_BYTES}}}")

_Settings = TypeVar("_Settings", bound="StoreSettings")


class StoreSettings(BaseModel):
    """Where the store is and whose blocks these are; what every integration takes in its engine's extra config."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str | None = None
    """`host:port` or `unix:/path`. None: `$KVSTORE_ADDRESS`, else the daemon on this node."""
    transport: str = "auto"
    """How blocks travel, see the client's docs."""
    tenant_salt: str = ""
    """Separates blocks of who may not share them; the same text on every engine that may."""
    weights_revision: str | None = Field(default=None, min_length=1)
    """Names the weights where their files cannot tell, or should not be read."""

    @classmethod
    def parse(cls: type[_Settings], extra_config: Mapping[str, Any] | None, *, where: str) -> _Settings:
        """Raises `InvalidArgumentError` naming the field, its value and what is allowed."""
        try:
            found = cls.model_validate(dict(extra_config or {}))
        except ValidationError as error:
            # A name that nobody knows comes first: what it was to say is missing elsewhere.
            first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
            name = ".".join(str(part) for part in first["loc"])
            allowed = first["msg"]
            if first["type"] == "extra_forbidden":
                allowed = f"one of {', '.join(sorted(cls.model_fields))}"
            raise InvalidArgumentError.of(f"{where}.{name}", first["input"], allowed) from error
        if found.address is not None:
            parse_address(found.address, field=f"{where}.address")
        if found.transport not in TRANSPORTS:
            raise InvalidArgumentError.of(f"{where}.transport", found.transport, ", ".join(TRANSPORTS))
        return found

    def open_client(self) -> Client:
        """A client with these settings; it connects at its first call, and asks again when there is no daemon."""
        return Client(self.address, config=ClientConfig(transport=self.transport))


def to_block_hash(key: bytes | str) -> BlockHash:
    """An engine's own block hash, chained over its prefix, as ours: 32 bytes as they are, others by BLAKE3.

    Text of 64 hexadecimal digits is the 32 bytes that it spells.
    """
    if isinstance(key, str):
        raw = bytes.fromhex(key) if _HEX_HASH.fullmatch(key) else key.encode()
    else:
        raw = key
    return BlockHash(raw if len(raw) == HASH_BYTES else blake3(raw).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """One block as an engine holds it: of some layers, of one shard."""

    layout: str
    """`HND`, `NHD` or `opaque:NAME`, see `kvstore.layout`."""
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    tokens_per_block: int

    @classmethod
    def of_bytes(cls, *, layout: str, num_layers: int, tokens_per_block: int, layer_bytes: int) -> BlockShape:
        """A block that holds more than K and V, or in another way than their sizes say: bytes, and NAME in `layout`."""
        tokens, rest = divmod(layer_bytes, tokens_per_block)
        tokens_per_block, head_dim = (1, layer_bytes) if rest else (tokens_per_block, tokens)
        return cls(
            layout=layout,
            dtype="int8",
            num_layers=num_layers,
            num_kv_heads=1,
            head_dim=head_dim,
            v_head_dim=0,
            tokens_per_block=tokens_per_block,
        )

    @property
    def payload_bytes(self) -> int:
        element_count = self.num_layers * self.num_kv_heads * self.tokens_per_block * (self.head_dim + self.v_head_dim)
        return element_count * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """The model that an engine serves: what its namespaces have in common."""

    model: str
    weights_revision: str
    settings: Mapping[str, object] = field(default_factory=dict)
    """All else that shapes K and V, or the hashes: positions, windows, quantisation, how the engine hashes."""
    tenant_salt: str = ""

    def namespace(
        self,
        shape: BlockShape,
        *,
        shard: Shard | None,
        lora: str = NONE,
        settings: Mapping[str, object] | None = None,
    ) -> Namespace:
        """The identity of blocks of this shape; `settings` are those of these layers alone."""
        return Namespace(
            model=self.model,
            weights_revision=self.weights_revision,
            tokenizer=TOKEN_IDS_ONLY,
            rope=position_settings({**self.settings, **(settings or {})}),
            dtype=shape.dtype,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            v_head_dim=shape.v_head_dim,
            tokens_per_block=shape.tokens_per_block,
            layout=shape.layout,
            shard=shard,
            lora=lora,
            tenant_salt=self.tenant_salt.encode(),
            k_precision="exact",
            v_precision="exact",
        )
