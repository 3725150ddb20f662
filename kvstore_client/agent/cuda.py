"""Opens an agent's pool that is on a GPU, in an engine's process. Needs torch, and CUDA's runtime as torch has it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvstore.errors import CapacityError, InvalidArgumentError

IPC_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the one flag there is


class IpcHandle(ctypes.Structure):
    """What CUDA passes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


def open_cuda_pool(ipc_handle: bytes, *, device_uuid: str, slot_count: int, block_bytes: int) -> Tensor:
    """[slot_count, block_bytes], on the GPU of that UUID; it lasts while the tensor does, or any view of it.

    Raises `InvalidArgumentError` for what is no handle, and `CapacityError` when this process does not reach the pool.
    """
    if len(ipc_handle) != IPC_HANDLE_BYTES:
        raise InvalidArgumentError.of("ipc_handle", ipc_handle, f"{IPC_HANDLE_BYTES} bytes")
    library = load_cudart_library()
    if library is None:
        raise CapacityError("no CUDA runtime library was found beside torch, so the agent's pool cannot be opened")
    device = _device_of(device_uuid)
    with torch.cuda.device(device):
        address = open_ipc(library, ipc_handle)
    return tensor_at(
        address,
        device,
        slot_count=slot_count,
        block_bytes=block_bytes,
        give_back=partial(close_ipc, library, address),
    )


def open_ipc(library: ctypes.CDLL, ipc_handle: bytes) -> int:
    """Where an allocation of another process is in this one; raises `CapacityError`."""
    address = ctypes.c_void_p()
    library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), IpcHandle, ctypes.c_uint)
    opened = IpcHandle.from_buffer_copy(ipc_handle)
    if code := library.cudaIpcOpenMemHandle(ctypes.byref(address), opened, _LAZY_PEER_ACCESS):
        # Taken, or torch would find the error after its own next call and blame that.
        library.cudaGetLastError()
        raise CapacityError(f"CUDA does not open the agent's pool: error {code}")
    assert address.value is not None, "a pool at no address"
    return address.value


def close_ipc(library: ctypes.CDLL, address: int) -> None:
    """An error is not told: the context that had it open is lost."""
    library.cudaIpcCloseMemHandle.argtypes = (ctypes.c_void_p,)
    if library.cudaIpcCloseMemHandle(address):
        library.cudaGetLastError()


def tensor_at(
    address: int, device: torch.device, *, slot_count: int, block_bytes: int, give_back: Callable[[], None]
) -> Tensor:
    """Memory of the device as rows; `give_back` is called when nothing looks into it any more."""
    memory = _Memory(address, slot_count * block_bytes, give_back=give_back)
    return torch.as_tensor(memory, device=device).view(slot_count, block_bytes)


def uuid_of(device: torch.device) -> str:
    """The same in all processes, which number devices as they like."""
    return str(torch.cuda.get_device_properties(device).uuid)


def load_cudart_library() -> ctypes.CDLL | None:
    """The runtime that this process's torch uses; None when there is none by its usual name."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None


def _device_of(uuid: str) -> torch.device:
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if uuid_of(device) == uuid:
            return device
    raise CapacityError(f"this process does not see the GPU {uuid}, on which the agent's pool is")


class _Memory:
    """Device memory as torch takes it; torch keeps this as long as it keeps the memory."""

    def __init__(self, address: int, size_bytes: int, *, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }

    def __del__(self) -> None:
        self._give_back()
