"""The identity of everything that must be equal before two engines may share a block.

Canonical encoding (docs/formats/keys.md): "KVNS", u16 version 1, then per field in ascending id:
u8 id, u32 length, value. Integers are u64; strings UTF-8; all little-endian. No field may be left out:
what is unknown cannot be compared, and "probably the same" serves wrong bytes.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, fields
from functools import cached_property

from blake3 import blake3

from kvstore.envelope import Codec, Envelope, EnvelopeTemplate
from kvstore.errors import InvalidArgumentError
from kvstore.keys import HASH_BYTES, BlockHash, NamespaceId
from kvstore.layout import BlockLayout, parse_order
from kvstore.precision import CODECS, EncodedLayout, encoded_layout

_MAGIC = b"KVNS"
_VERSION = 1
STRING_MAX_BYTES = 4096
"""Longest string or salt in a namespace; rope settings of real models stay under 1 KiB."""

NONE = "none"
"""What to say for `rope` or `lora` when the model has none; an empty string is refused as unknown."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Which part of the model's KV a block holds: ranks and sizes of tensor, pipeline and context parallelism."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(getattr(self, field.name)) is not int:
                raise InvalidArgumentError.of(f"shard.{field.name}", getattr(self, field.name), "a whole number")
        for kind in ("tp", "pp", "dcp"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if not 1 <= size <= 65536:
                raise InvalidArgumentError.of(f"shard.{kind}_size", size, "1 to 65536")
            if not 0 <= rank < size:
                raise InvalidArgumentError.of(f"shard.{kind}_rank", rank, f"0 to {size - 1}")

    def encode(self) -> bytes:
        return struct.pack("<6I", self.tp_rank, self.tp_size, self.pp_rank, self.pp_size, self.dcp_rank, self.dcp_size)

    @classmethod
    def decode(cls, data: bytes) -> Shard:
        tp_rank, tp_size, pp_rank, pp_size, dcp_rank, dcp_size = struct.unpack("<6I", data)
        return cls(
            tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size, dcp_rank=dcp_rank, dcp_size=dcp_size
        )


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Complete, fail-closed identity; every field is required and checked when built."""

    model: str
    """Name of the model; says nothing about its weights."""
    weights_revision: str
    """Commit or digest of the weights."""
    tokenizer: str
    """Digest or name of the tokenizer that made the ids."""
    rope: str
    """Canonical JSON of the position settings, or `none`."""
    dtype: str
    """Element type of the planes, a key of `layout.DTYPE_BYTES`."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    """Of the K plane."""
    v_head_dim: int
    """Of the V plane; 0 when there is none."""
    tokens_per_block: int
    layout: str
    """`HND`, `NHD` or `opaque:NAME`, see `layout`."""
    shard: Shard | None
    """None when the layout is shard-agnostic."""
    lora: str
    """Digest of the adapter's content, never its name, or `none`."""
    tenant_salt: bytes
    """Separates tenants; empty on a single-tenant daemon."""
    k_precision: str
    """How the K plane is stored, one of `precision.PRECISIONS`; `exact` loses no bit."""
    v_precision: str
    """How the V plane is stored; `exact` when there is none."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _STRING_FIELDS:
                _check_string(field.name, value)
            elif field.name in _INTEGER_FIELDS and (not isinstance(value, int) or isinstance(value, bool)):
                raise InvalidArgumentError.of(field.name, value, "a whole number")
        parse_order(self.layout)
        if self.shard is not None and not isinstance(self.shard, Shard):
            raise InvalidArgumentError.of("shard", self.shard, "a Shard, or None when the layout is shard-agnostic")
        if not isinstance(self.tenant_salt, bytes) or len(self.tenant_salt) > STRING_MAX_BYTES:
            raise InvalidArgumentError.of("tenant_salt", self.tenant_salt, f"up to {STRING_MAX_BYTES} bytes")
        self.encoded_layout  # noqa: B018  (checks dtype, sizes and precisions)

    @cached_property
    def block_layout(self) -> BlockLayout:
        return BlockLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            tokens_per_block=self.tokens_per_block,
            dtype=self.dtype,
            order=parse_order(self.layout),
        )

    @cached_property
    def encoded_layout(self) -> EncodedLayout:
        """How a block is stored; `block_layout` is how an engine has it."""
        return encoded_layout(self.block_layout, k_precision=self.k_precision, v_precision=self.v_precision)

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of one block as it is stored, without its envelope: what `put` takes and `get` gives."""
        return self.encoded_layout.payload_bytes

    def check_exact(self) -> None:
        """For who stores blocks as an engine has them: raises `InvalidArgumentError` when a plane takes fewer bits."""
        for field, plane in zip(("k_precision", "v_precision"), self.encoded_layout.planes, strict=False):
            if not plane.is_exact:
                raise InvalidArgumentError.of(field, plane.precision, "exact: nothing encodes blocks here")

    @cached_property
    def envelopes(self) -> EnvelopeTemplate:
        """Of this namespace's blocks, which it says all of but the checksum."""
        k, *v = self.encoded_layout.planes
        return EnvelopeTemplate(
            Envelope(
                namespace_id=self.id,
                block_hash=BlockHash(bytes(HASH_BYTES)),
                k_codec=CODECS[k.precision],
                v_codec=CODECS[v[0].precision] if v else Codec.NONE,
                tokens=self.tokens_per_block,
                k_bytes=k.size_bytes,
                v_bytes=v[0].size_bytes if v else 0,
                decoded_bytes=self.block_layout.payload_bytes,
                payload_checksum=0,
            )
        )

    @cached_property
    def id(self) -> NamespaceId:
        return NamespaceId(blake3(self.encode()).digest())

    def encode(self) -> bytes:
        """The canonical bytes; equal if and only if the namespaces are."""
        parts = [_MAGIC, struct.pack("<H", _VERSION)]
        for number, name in _FIELDS.items():
            value = _encode_value(getattr(self, name))
            parts += [struct.pack("<BI", number, len(value)), value]
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> Namespace:
        """The inverse of `encode`; anything but the one canonical form is refused."""
        if data[:4] != _MAGIC or data[4:6] != struct.pack("<H", _VERSION):
            raise InvalidArgumentError.of("namespace", data[:6], "a canonical encoding, version 1")
        values: dict[str, object] = {}
        position = 6
        for number, name in _FIELDS.items():
            header = data[position : position + 5]
            if len(header) < 5 or header[0] != number:
                raise InvalidArgumentError.of("namespace", f"no field {name} at byte {position}", "all fields in order")
            (length,) = struct.unpack("<I", header[1:])
            value = data[position + 5 : position + 5 + length]
            if len(value) != length:
                raise InvalidArgumentError.of("namespace", f"{name} cut off", f"{length} bytes")
            values[name] = _decode_value(name, value)
            position += 5 + length
        if position != len(data):
            raise InvalidArgumentError.of(
                "namespace", f"{len(data) - position} bytes too many", "nothing after field 16"
            )
        return cls(**values)  # type: ignore[arg-type]  # checked field by field in __post_init__


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field in which two namespaces differ; `rope.NAME` where that is JSON with names."""

    field: str
    own: str
    other: str


def differences(own: Namespace, other: Namespace) -> tuple[FieldDifference, ...]:
    """Why blocks of one are misses in the other, field by field; none if and only if they are equal."""
    found: list[FieldDifference] = []
    for name in _FIELDS.values():
        mine, theirs = getattr(own, name), getattr(other, name)
        if mine == theirs:
            continue
        parts = (_named_settings(mine), _named_settings(theirs)) if name == "rope" else (None, None)
        if parts[0] is None or parts[1] is None:
            found.append(FieldDifference(name, _shown(mine), _shown(theirs)))
            continue
        for key in sorted(parts[0].keys() | parts[1].keys()):
            mine, theirs = parts[0].get(key), parts[1].get(key)
            if mine != theirs:
                found.append(FieldDifference(f"{name}.{key}", _shown(mine), _shown(theirs)))
    return tuple(found)


def _named_settings(text: str) -> dict[str, object] | None:
    try:
        settings = json.loads(text)
    except ValueError:
        return None
    return settings if isinstance(settings, dict) else None


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        # A salt is a secret of its tenant.
        return f"{len(value)} bytes, blake3 {blake3(value).hexdigest()[:16]}" if value else "none"
    return value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)


_FIELDS: dict[int, str] = {number: field.name for number, field in enumerate(fields(Namespace), start=1)}
_INTEGER_FIELDS = frozenset({"num_layers", "num_kv_heads", "head_dim", "v_head_dim", "tokens_per_block"})
_STRING_FIELDS = frozenset(_FIELDS.values()) - _INTEGER_FIELDS - {"shard", "tenant_salt"}


def _check_string(name: str, value: object) -> None:
    allowed = f"1 to {STRING_MAX_BYTES} bytes of UTF-8 (unknown is not allowed)"
    if not isinstance(value, str) or not value:
        raise InvalidArgumentError.of(name, value, allowed)
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgumentError.of(name, value, allowed) from error
    if size_bytes > STRING_MAX_BYTES:
        raise InvalidArgumentError.of(name, value, allowed)


def _encode_value(value: object) -> bytes:
    match value:
        case str():
            return value.encode()
        case int():
            return struct.pack("<Q", value)
        case bytes():
            return value
        case Shard():
            return value.encode()
        case _:
            assert value is None, f"no encoding for {value!r}"
            return b""


def _decode_value(name: str, value: bytes) -> object:
    try:
        if name in _INTEGER_FIELDS:
            return struct.unpack("<Q", value)[0]
        if name == "shard":
            return Shard.decode(value) if value else None
        return value if name == "tenant_salt" else value.decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise InvalidArgumentError.of(f"namespace.{name}", value, "its documented encoding") from error
