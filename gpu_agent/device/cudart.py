"""The calls of the CUDA runtime that torch has no name for. The one module that calls it."""

from __future__ import annotations

import ctypes
from typing import Any

from gpu_agent.core.transfers import Transfer
from kvstore.errors import CapacityError, InternalError
from kvstore_client.agent.cuda import IpcHandle, load_cudart_library

_KIND_DEFAULT = 4  # cudaMemcpyDefault: the addresses say which side is the device
_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: for all CUDA contexts, not only this thread's
_REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly: the only way to register what is mapped read-only


class Cudart:
    """A loaded CUDA runtime. Its current device and its streams are torch's, because torch has loaded the same one."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._copy = _function(library, "cudaMemcpyAsync", pointer, pointer, size, number, pointer)
        self._copy_2d = _function(
            library, "cudaMemcpy2DAsync", pointer, size, pointer, size, size, size, number, pointer
        )
        self._register = _function(library, "cudaHostRegister", pointer, size, ctypes.c_uint)
        self._unregister = _function(library, "cudaHostUnregister", pointer)
        self._malloc = _function(library, "cudaMalloc", ctypes.POINTER(pointer), size)
        self._free = _function(library, "cudaFree", pointer)
        self._ipc_handle = _function(library, "cudaIpcGetMemHandle", ctypes.POINTER(IpcHandle), pointer)
        self._take_last_error = _function(library, "cudaGetLastError")
        self._error_string = _function(library, "cudaGetErrorString", number)
        self._error_string.restype = ctypes.c_char_p

    def copy(self, transfer: Transfer, *, stream: int) -> None:
        """Queues one transfer; raises `InternalError`."""
        if transfer.row_count == 1:
            code = self._copy(transfer.target, transfer.source, transfer.row_bytes, _KIND_DEFAULT, stream)
        else:
            code = self._copy_2d(
                transfer.target,
                transfer.target_pitch_bytes,
                transfer.source,
                transfer.source_pitch_bytes,
                transfer.row_bytes,
                transfer.row_count,
                _KIND_DEFAULT,
                stream,
            )
        if code:
            raise InternalError(f"copy failed: {self._explain(code)}")

    def register(self, address: int, size_bytes: int, *, is_read_only: bool) -> bool:
        """Page-locks host memory and makes it reachable by DMA; raises `CapacityError`.

        False when somebody else in this process, such as the engine, has registered it and will unregister it. If that
        happens under our copies they get slow, not wrong.
        """
        flags = _REGISTER_PORTABLE | (_REGISTER_READ_ONLY if is_read_only else 0)
        code = self._register(address, size_bytes, flags)
        if code == _ALREADY_REGISTERED:
            self._take_last_error()
            return False
        if code:
            kind = "read-only memory" if is_read_only else "memory"
            raise CapacityError(f"CUDA does not register {size_bytes} bytes of {kind}: {self._explain(code)}")
        return True

    def unregister(self, address: int) -> None:
        if code := self._unregister(address):
            raise InternalError(f"CUDA does not unregister the memory at {address:#x}: {self._explain(code)}")

    def allocate(self, size_bytes: int) -> int:
        """The address of memory on the current device; raises `CapacityError`."""
        address = ctypes.c_void_p()
        if code := self._malloc(ctypes.byref(address), size_bytes):
            raise CapacityError(f"CUDA does not allocate {size_bytes} bytes: {self._explain(code)}")
        assert address.value is not None, f"{size_bytes} bytes at no address"
        return address.value

    def free(self, address: int) -> None:
        """Waits for the whole device, as CUDA does. An error is not told: the context that had the memory is lost."""
        if self._free(address):
            self._take_last_error()

    def ipc_handle(self, address: int) -> bytes:
        """What another process opens this allocation with; raises `CapacityError`, as in some containers."""
        handle = IpcHandle()
        if code := self._ipc_handle(ctypes.byref(handle), address):
            raise CapacityError(f"CUDA does not share the pool: {self._explain(code)}")
        return bytes(handle.reserved)

    def _explain(self, code: int) -> str:
        # Taken, or torch would find the error after its own next call and blame that.
        self._take_last_error()
        return f"{self._error_string(code).decode()} ({code})"


def load_cudart() -> Cudart | None:
    """The runtime that this process's torch uses; None when there is none by its usual name."""
    library = load_cudart_library()
    try:
        return None if library is None else Cudart(library)
    except AttributeError:  # without one of these functions
        return None


def _function(library: ctypes.CDLL, name: str, *argument_types: Any) -> Any:
    function = getattr(library, name)
    function.argtypes = argument_types
    function.restype = ctypes.c_int
    return function
