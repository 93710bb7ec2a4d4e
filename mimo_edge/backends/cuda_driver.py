"""The CUDA driver calls that the backend makes, each checked. cuda-python alone: no runtime library, no compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo_edge.errors import MimoEdgeError, UnsupportedError
from mimo_edge.extras import needs_extra

CTYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
_DEFAULT_SHARED = 48 << 10  # bytes a block gets without asking


class OutOfMemoryError(MimoEdgeError):
    """The device (or pinned host memory) has no room."""


class Driver:
    """One device, its primary context (shared with PyTorch and CuPy) and one stream.

    Every method may be called from any thread once `enter` was called there. Raises MimoEdgeError on a failing call,
    UnsupportedError when there is no driver or no GPU.
    """

    def __init__(self, device: int = 0, api: Any = None):
        """`api` is cuda.bindings.driver or what stands in for it."""
        if api is None:
            with needs_extra("cuda", "backend 'cuda'"):
                import cuda.bindings.driver as api  # type: ignore[no-redef]
        self._api = api
        self._start()
        count = self._call(api.cuDeviceGetCount)
        if device >= count:
            raise UnsupportedError(f"no NVIDIA GPU number {device} ({count} found): use --backend onnxruntime")
        self._device = self._call(api.cuDeviceGet, device)
        self.device = device
        self.version = int(self._call(api.cuDriverGetVersion))  # 12060: CUDA 12.6
        self.name = self._call(api.cuDeviceGetName, 256, self._device).split(b"\0")[0].decode()
        attribute = api.CUdevice_attribute
        major = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        self.capability = 10 * major + self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.multiprocessors = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self._context = self._call(api.cuDevicePrimaryCtxRetain, self._device)
        self.enter()
        self.stream = self._call(api.cuStreamCreate, api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._closed = False

    def _start(self) -> None:
        try:
            (status,) = self._api.cuInit(0)
        except Exception as e:  # cuda-python: the driver's library is not there
            raise UnsupportedError(f"no NVIDIA driver ({_line(e)}): use --backend onnxruntime") from None
        if status != self._api.CUresult.CUDA_SUCCESS:
            raise UnsupportedError(f"no usable NVIDIA GPU ({self._why(status)}): use --backend onnxruntime")

    def enter(self) -> None:
        """Makes the context current in this thread."""
        self._call(self._api.cuCtxSetCurrent, self._context)

    @property
    def integrated(self) -> bool:
        """Whether the GPU shares the machine's memory, as on a Jetson."""
        return bool(self._attribute(self._api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED))

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        free, total = self._call(self._api.cuMemGetInfo)
        return int(free), int(total)

    def malloc(self, nbytes: int) -> int:
        """Address of new device memory, aligned to 256 bytes. Raises OutOfMemoryError."""
        return int(self._call(self._api.cuMemAlloc, nbytes))

    def free(self, address: int) -> None:
        self._call(self._api.cuMemFree, address)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory, uint8 [nbytes]; give it back with `unpin`."""
        address = int(self._call(self._api.cuMemHostAlloc, nbytes, 0))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def unpin(self, array: NDArray) -> None:
        self._call(self._api.cuMemFreeHost, array.ctypes.data)

    def upload(self, to: int, source: NDArray) -> None:
        """Queues a copy of a contiguous host array, which must stay as it is until the copy is done."""
        self._call(self._api.cuMemcpyHtoDAsync, to, source.ctypes.data, source.nbytes, self.stream)

    def download(self, to: NDArray, source: int, nbytes: int | None = None) -> None:
        """Queues a copy into a contiguous host array, of `nbytes` or all of it."""
        self._call(self._api.cuMemcpyDtoHAsync, to.ctypes.data, source, nbytes or to.nbytes, self.stream)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Queues a copy within the device."""
        self._call(self._api.cuMemcpyDtoDAsync, to, source, nbytes, self.stream)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        self._call(self._api.cuMemsetD8Async, address, byte, nbytes, self.stream)

    def load(self, code: bytes) -> Any:
        """A module of a cubin, or of PTX text, which the driver then compiles."""
        return self._call(self._api.cuModuleLoadData, code if code[:4] == b"\x7fELF" else code + b"\0")

    def unload(self, module: Any) -> None:
        self._call(self._api.cuModuleUnload, module)

    def function(self, module: Any, entry: str, shared: int) -> Any:
        """The kernel `entry`, allowed to use `shared` bytes of shared memory a block."""
        function = self._call(self._api.cuModuleGetFunction, module, entry.encode())
        if shared > _DEFAULT_SHARED:
            attribute = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call(self._api.cuFuncSetAttribute, function, attribute, shared)
        return function

    def launch(
        self,
        function: Any,
        grid: Sequence[int],
        threads: int,
        shared: int,
        values: Sequence[ctypes._SimpleCData],
        overlap: bool = False,
    ) -> None:
        """Queues a kernel; `values` are its arguments as ctypes objects. `overlap` lets it start before the one in
        front of it ends (programmatic dependent launch): it must wait for that itself."""
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        config = self._api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, self.stream
        if overlap:
            attribute = self._api.CUlaunchAttribute()
            attribute.id = self._api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        self._call(self._api.cuLaunchKernelEx, config, function, ctypes.addressof(pointers), 0)

    def capture(self, launches: Callable[[], None]) -> Any:
        """What `launches` queues, as a graph that `replay` runs."""
        api = self._api
        self._call(api.cuStreamBeginCapture, self.stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            launches()
        except BaseException:
            api.cuStreamEndCapture(
                self.stream
            )  # the stream must leave capture mode; the first error is the one to tell
            raise
        graph = self._call(api.cuStreamEndCapture, self.stream)
        try:
            return self._call(api.cuGraphInstantiate, graph, 0)
        finally:
            self._call(api.cuGraphDestroy, graph)

    def replay(self, graph: Any) -> None:
        self._call(self._api.cuGraphLaunch, graph, self.stream)

    def drop(self, graph: Any) -> None:
        self._call(self._api.cuGraphExecDestroy, graph)

    def sync(self) -> None:
        """Waits until everything queued is done."""
        self._call(self._api.cuStreamSynchronize, self.stream)

    @contextmanager
    def timed(self, times: list[float]) -> Iterator[None]:
        """Appends the milliseconds that the device spends on what the block queues; waits for it."""
        begin, end = (self._call(self._api.cuEventCreate, 0) for _ in range(2))
        try:
            self._call(self._api.cuEventRecord, begin, self.stream)
            yield
            self._call(self._api.cuEventRecord, end, self.stream)
            self._call(self._api.cuEventSynchronize, end)
            times.append(float(self._call(self._api.cuEventElapsedTime, begin, end)))
        finally:
            for event in (begin, end):
                self._call(self._api.cuEventDestroy, event)

    def close(self) -> None:
        """Gives stream and context back; device memory must have been freed."""
        if not self._closed:
            self._closed = True
            self._call(self._api.cuStreamDestroy, self.stream)
            self._call(self._api.cuDevicePrimaryCtxRelease, self._device)

    def _attribute(self, attribute: Any) -> int:
        return int(self._call(self._api.cuDeviceGetAttribute, attribute, self._device))

    def _call(self, function: Callable[..., tuple], *args: Any) -> Any:
        """The call's result: nothing, one value, or a tuple of values."""
        status, *values = function(*args)
        codes = self._api.CUresult
        if status == codes.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfMemoryError(f"GPU memory ran out in {_name(function)}: choose a smaller --context")
        if status != codes.CUDA_SUCCESS:
            raise MimoEdgeError(f"CUDA failed in {_name(function)}: {self._why(status)}")
        return values[0] if len(values) == 1 else tuple(values) or None

    def _why(self, status: Any) -> str:
        texts = [f(status)[1] for f in (self._api.cuGetErrorName, self._api.cuGetErrorString)]
        return ": ".join(t.decode() for t in texts if t)


def _name(function: Callable) -> str:
    return getattr(function, "__name__", str(function))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
