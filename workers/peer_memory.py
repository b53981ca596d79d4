"""Device memory that all ranks of a replica can read and write, each rank's part on its own GPU.

Called by: nccl_group.py, once, at the start. The driver's own calls, through ctypes: memory that is shared between
processes (CUDA IPC) must come from cuMemAlloc, not out of the middle of a caching allocator's block. Ranks tell each
other where it is through the store in which they met.

When a peer dies: its memory stays mapped here until `close`; what is read there is what it wrote last.
"""

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist

from .agreement import Agreement

_HANDLE_BYTES = 64
"""sizeof(CUipcMemHandle)."""
_LAZY_ENABLE_PEER_ACCESS = 1
_NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED."""
_GRANULARITY = 2 << 20
"""What is smaller the driver cuts out of a larger block, and the peers would map all of that."""


class PeerMemory:
    """`num_bytes` of zeros on each rank's GPU, mapped by all ranks. These see all GPUs, under the same numbers.

    addresses: of every rank's part, in this process, by rank
    """

    def __init__(
        self, store: dist.Store, *, rank: int, size: int, num_bytes: int, device: torch.device
    ) -> None:
        """Allocate, and meet the others; blocks until they are here, at most the store's timeout.

        Raises PeerAccessError, on all ranks or none, when the driver refuses one of them: no peer access between
        two of the GPUs or none with atomic operations (as over PCI Express), no IPC in this container.
        """
        self._resources = ExitStack()
        self.addresses: Sequence[int] = ()
        index = 0 if device.index is None else device.index
        # The driver's calls work on the context that torch makes current by this.
        torch.zeros(1, device=device)
        with Agreement(store, "peer-memory-allocated", rank, size, PeerAccessError) as agreement:
            driver = _Driver()
            own = driver.allocate(-(-num_bytes // _GRANULARITY) * _GRANULARITY)
            driver.clear(own, num_bytes)
            agreement.says = bytes([index]) + driver.export(own)
        try:
            with Agreement(store, "peer-memory-opened", rank, size, PeerAccessError):
                self.addresses = [
                    own if peer == rank else self._open(driver, index, heard)
                    for peer, heard in enumerate(agreement.heard)
                ]
        except BaseException:
            self._resources.close()
            raise

    def close(self) -> None:
        """Unmap the peers' parts. Idempotent. The own part stays until this process ends: a peer may still read it."""
        self._resources.close()

    def _open(self, driver: "_Driver", own_index: int, heard: bytes) -> int:
        peer_index, handle = heard[0], heard[1:]
        if not driver.has_atomics(own_index, peer_index):
            raise PeerAccessError(f"GPU {own_index} has no atomic operations on GPU {peer_index}")
        address = driver.open(handle)
        self._resources.callback(driver.close, address)
        return address


class PeerAccessError(RuntimeError):
    """The driver does not let these ranks see each other's memory."""


class _Driver:
    """The few calls of the CUDA driver that torch does not offer."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PeerAccessError(f"no CUDA driver: {error}") from None

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def clear(self, address: int, num_bytes: int) -> None:
        self._call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        self._call("cuCtxSynchronize")

    def has_atomics(self, index: int, peer_index: int) -> bool:
        devices = []
        for number in (index, peer_index):
            device = ctypes.c_int()
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
            devices.append(device)
        found = ctypes.c_int()
        self._call("cuDeviceGetP2PAttribute", ctypes.byref(found), ctypes.c_int(_NATIVE_ATOMICS), *devices)
        return found.value != 0

    def export(self, address: int) -> bytes:
        handle = (ctypes.c_ubyte * _HANDLE_BYTES)()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        # By value, as the driver takes it.
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _IpcHandle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
        )
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(result, ctypes.byref(text))
            raise PeerAccessError(f"{name}: {(text.value or b'').decode() or f'error {result}'}")


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)
