"""What SGLang's HiCache lacks on a machine without a GPU, for tests alone: put this folder first in PYTHONPATH.

Its scheduler starts processes of its own, so this has to be here rather than in a test. Host memory is not registered
with a device, copies between "device" and host are torch's, and events and streams, which PyTorch's CPU module has
none of, are always done.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _AnyName(type):
    """Of classes that have every attribute: for code that imports torchvision, and then does not use it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _Anything(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "0.0"  # type: ignore[attr-defined]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a function on a module once it is loaded."""

    def __init__(self, amend: dict[str, Callable[[ModuleType], None]]) -> None:
        self._amend = amend

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        amend = self._amend.pop(fullname, None)
        if amend is None:
            return None
        spec = importlib.util.find_spec(fullname)
        assert spec is not None, fullname
        assert spec.loader is not None, fullname
        load = spec.loader.exec_module

        def load_and_amend(module: ModuleType) -> None:
            load(module)
            amend(module)

        spec.loader.exec_module = load_and_amend  # type: ignore[method-assign]
        return spec


class _Done:
    """An event or a stream of a device that has done everything as soon as it is asked."""

    def __init__(self, *_arguments: object, **settings: object) -> None:
        if settings.get("enable_timing"):
            raise NotImplementedError("no timing without a device")

    def record(self, *_arguments: object) -> None: ...
    def wait(self, *_arguments: object) -> None: ...
    def wait_event(self, *_arguments: object) -> None: ...
    def wait_stream(self, *_arguments: object) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _amend_torch_cpu(cpu: ModuleType) -> None:
    stream = cpu.Stream
    for name in ("wait_event", "wait_stream", "synchronize", "record_event", "query"):
        if not hasattr(stream, name):
            setattr(stream, name, getattr(_Done, name, _Done.record))
    cpu.Event = _Done  # type: ignore[attr-defined]


def _amend_common(common: ModuleType) -> None:
    common._cuda_host_register = lambda buffer, granularity_bytes=None: None  # type: ignore[attr-defined]


def _amend_base(base: ModuleType) -> None:
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # type: ignore[attr-defined]


def _copy_rows(*, src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _copy_pages_to_host(*, src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """From one tensor per layer, K and then V, to pages that hold all layers."""
    layer_count = len(src_ptrs) // len(dst_ptrs)
    for plane, pages in enumerate(dst_ptrs):
        for layer in range(layer_count):
            rows = src_ptrs[plane * layer_count + layer][src_indices]
            pages[dst_indices[::page_size] // page_size, layer] = rows.reshape(-1, page_size, *rows.shape[1:])


def _copy_layer_to_device(
    *, src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    for pages, target in zip(src_ptrs, dst_ptrs, strict=True):
        rows = pages[src_indices[::page_size] // page_size, layer_id]
        target[dst_indices] = rows.reshape(-1, *rows.shape[2:])


def _amend_mha(mha: ModuleType) -> None:
    mha.transfer_kv_direct = _copy_rows  # type: ignore[attr-defined]
    mha.transfer_kv_all_layer_direct_lf_pf = _copy_pages_to_host  # type: ignore[attr-defined]
    mha.transfer_kv_per_layer_direct_pf_lf = _copy_layer_to_device  # type: ignore[attr-defined]


_POOLS = "sglang.srt.mem_cache.pool_host"
sys.meta_path[:0] = [
    _Torchvision(),
    _AfterImport(
        {
            "torch.cpu": _amend_torch_cpu,
            f"{_POOLS}.common": _amend_common,
            f"{_POOLS}.base": _amend_base,
            f"{_POOLS}.mha": _amend_mha,
        }
    ),
]
