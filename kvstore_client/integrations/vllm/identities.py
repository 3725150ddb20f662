"""Which namespaces a request's blocks belong to: those of the model, of the ranks, and of the request's adapter.

What must be read from disk (weights, adapters) is read in the background. A request whose identity is not known yet
finds nothing and stores nothing.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from kvstore.errors import KvstoreError
from kvstore.namespace import NONE, Namespace
from kvstore_client.integrations._blocks import EngineModel
from kvstore_client.integrations.vllm.messages import IdentityId, RankKey, RankLayout

_LOG = logging.getLogger("vllm.kvstore")  # below vLLM's own logger, so that its handlers show it

Settings = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter as the engine has loaded it; `id` is new for every loading, except in place."""

    name: str
    id: int
    path: str
    is_replaced_in_place: bool = False
    """All of the above may stay the same while the weights become others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    id: IdentityId
    namespaces: Mapping[RankKey, tuple[Namespace | None, ...]]
    """Per rank and group."""

    def shards(self) -> Sequence[tuple[Namespace | None, ...]]:
        """The namespaces of each shard once: ranks that hold the same bytes share theirs."""
        return list(dict.fromkeys(self.namespaces.values()))

    def encoded(self) -> Mapping[RankKey, tuple[bytes | None, ...]]:
        return {
            rank: tuple(None if namespace is None else namespace.encode() for namespace in groups)
            for rank, groups in self.namespaces.items()
        }


class Identities:
    """Finds identities, each under a number that workers know it by. For threads."""

    def __init__(
        self,
        *,
        make_model: Callable[[], EngineModel],
        adapter_revision: Callable[[str], str],
        group_settings: Sequence[Settings],
        late_settings: Callable[[], Settings],
        executor: Executor,
    ) -> None:
        """`late_settings` are those of the engine that it knows only once there are requests."""
        self._late_settings = late_settings
        self._make_model = make_model
        self._adapter_revision = adapter_revision
        self._group_settings = group_settings
        self._executor = executor
        self._lock = threading.Lock()
        self._ranks: Mapping[RankKey, RankLayout] = {}
        self._model: EngineModel | None = None
        self._suffix = ""
        self._loras: dict[Adapter, str | None] = {}
        """Digest of each adapter; None while it is read, and for those that cannot be."""
        self._found: dict[str, Identity] = {}
        self._next_id = 0

    def begin(self, ranks: Mapping[RankKey, RankLayout]) -> None:
        """Starts to find out what the model is, now that the workers have said how they hold blocks."""
        self._ranks = ranks
        self._executor.submit(self._read_model)

    def find(self, adapter: Adapter | None) -> Identity | None:
        """None as long as it is not known, and for ever where it cannot be."""
        with self._lock:
            if self._model is None:
                return None
            if adapter is None:
                return self._identity(NONE)
            if adapter in self._loras:
                lora = self._loras[adapter]
                return None if lora is None else self._identity(lora)
            self._loras[adapter] = None
        self._executor.submit(self._read_adapter, adapter)
        return None

    def renew(self) -> None:
        """The model has become another one: nothing that was stored is found any more, by this engine."""
        with self._lock:
            self._suffix = f"+{uuid.uuid4().hex}"
            self._found.clear()

    def _identity(self, lora: str) -> Identity:
        identity = self._found.get(lora)
        if identity is None:
            assert self._model is not None
            model = EngineModel(
                model=self._model.model,
                weights_revision=self._model.weights_revision + self._suffix,
                settings={**self._model.settings, **self._late_settings()},
                tenant_salt=self._model.tenant_salt,
            )
            namespaces = {rank: self._namespaces(model, layout, lora) for rank, layout in self._ranks.items()}
            identity = Identity(id=IdentityId(self._next_id), namespaces=namespaces)
            self._next_id += 1
            self._found[lora] = identity
        return identity

    def _namespaces(self, model: EngineModel, layout: RankLayout, lora: str) -> tuple[Namespace | None, ...]:
        return tuple(
            model.namespace(shape, shard=layout.shard, lora=lora, settings={**settings, "layers": ",".join(layers)})
            if shape is not None
            else None
            for shape, layers, settings in zip(layout.shapes, layout.layers, self._group_settings, strict=True)
        )

    def _read_model(self) -> None:
        try:
            model = self._make_model()
            for layout in self._ranks.values():
                self._namespaces(model, layout, NONE)
        except (KvstoreError, OSError) as error:
            _LOG.warning("nothing is stored or loaded, as it is not known which model this is: %s", error)
            return
        except Exception:
            _LOG.exception("nothing is stored or loaded, as it is not known which model this is")
            raise
        _LOG.info("blocks of %s (%s) are stored and loaded", model.model, model.weights_revision)
        with self._lock:
            self._model = model

    def _read_adapter(self, adapter: Adapter) -> None:
        if adapter.is_replaced_in_place:
            _LOG.warning("nothing is stored or loaded for adapter %s: it may be replaced in place", adapter.name)
            return
        try:
            lora = self._adapter_revision(adapter.path)
        except (KvstoreError, OSError) as error:
            _LOG.warning("nothing is stored or loaded for adapter %s: %s", adapter.name, error)
            return
        except Exception:
            _LOG.exception("nothing is stored or loaded for adapter %s", adapter.name)
            raise
        with self._lock:
            self._loras[adapter] = lora
