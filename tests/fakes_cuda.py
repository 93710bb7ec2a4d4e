"""A stand-in for cuda.bindings.driver: device memory is this process's, kernels run in Triton's interpreter.

It keeps the rules that matter: every address must lie in live memory, a call that fails answers a code, work queued
during capture runs at replay, a module's code must be one that `Code` knows.
"""

import ctypes
import enum
from types import SimpleNamespace

import interpret
import torch

from mimo_edge.kernels.launch import Variant


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209


OK = Result.CUDA_SUCCESS


def cubin_of(variant: Variant) -> bytes:
    """What stands for compiled code: the magic number of ELF and the variant's key."""
    return b"\x7fELF" + variant.key.encode()


def ptx_of(variant: Variant) -> bytes:
    return b".version 8.7 // " + variant.key.encode()


class LaunchConfig(SimpleNamespace):
    numAttrs = 0


class FakeCuda:
    """`memory` bytes in all; `largest` is the most one allocation may take. `calls` lists the names of all calls."""

    CUresult = Result
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="sm",
        CU_DEVICE_ATTRIBUTE_INTEGRATED="integrated",
    )
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUlaunchConfig = LaunchConfig
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(
        self,
        variants: dict[str, Variant] | None = None,
        *,
        capability: int = 87,
        version: int = 13000,
        memory: int = 1 << 30,
        largest: int = 256 << 20,
        devices: int = 1,
        integrated: bool = False,
    ):
        self.variants, self.capability, self.version = variants or {}, capability, version
        self.memory, self.largest, self.devices = memory, largest, devices
        self.integrated = integrated
        self.live: dict[int, ctypes.Array] = {}
        self.calls: list[str] = []
        self.allocated: list[int] = []
        self._capturing: list | None = None
        self._shared: dict[str, int] = {}
        self.loaded: list[bytes] = []

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if name.startswith("cu") and not name.startswith("cuGetError"):
            self.calls.append(name)
        return value

    def CUlaunchAttribute(self):
        return SimpleNamespace(value=SimpleNamespace())

    # device and context
    def cuInit(self, flags):
        return (OK if self.devices else Result.CUDA_ERROR_NO_DEVICE,)

    def cuDeviceGetCount(self):
        return OK, self.devices

    def cuDeviceGet(self, ordinal):
        return OK, ordinal

    def cuDriverGetVersion(self):
        return OK, self.version

    def cuDeviceGetName(self, size, device):
        return OK, b"Fake GPU".ljust(size, b"\0")

    def cuDeviceGetAttribute(self, attribute, device):
        values = {"major": self.capability // 10, "minor": self.capability % 10, "sm": 8, "integrated": self.integrated}
        return OK, values[attribute]

    def cuDevicePrimaryCtxRetain(self, device):
        return OK, "context"

    def cuDevicePrimaryCtxRelease(self, device):
        return (OK,)

    def cuCtxSetCurrent(self, context):
        return (OK,)

    def cuGetErrorName(self, code):
        return OK, code.name.encode()

    def cuGetErrorString(self, code):
        return OK, b"a fake's words"

    # memory
    def cuMemGetInfo(self):
        return OK, self.memory - sum(map(len, self.live.values())), self.memory

    def cuMemAlloc(self, nbytes):
        if nbytes > self.largest or sum(map(len, self.live.values())) + nbytes > self.memory:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, 0
        self.allocated.append(nbytes)
        return OK, self._new(nbytes)

    def cuMemHostAlloc(self, nbytes, flags):
        return OK, self._new(nbytes)

    def cuMemFree(self, address):
        del self.live[address]
        return (OK,)

    cuMemFreeHost = cuMemFree

    def cuMemcpyHtoDAsync(self, to, source, nbytes, stream):
        return self._do(lambda: ctypes.memmove(self._check(to, nbytes), source, nbytes))

    def cuMemcpyDtoHAsync(self, to, source, nbytes, stream):
        return self._do(lambda: ctypes.memmove(to, self._check(source, nbytes), nbytes))

    def cuMemcpyDtoDAsync(self, to, source, nbytes, stream):
        return self._do(lambda: ctypes.memmove(self._check(to, nbytes), self._check(source, nbytes), nbytes))

    def cuMemsetD8Async(self, address, byte, nbytes, stream):
        return self._do(lambda: ctypes.memset(self._check(address, nbytes), byte, nbytes))

    def _new(self, nbytes):
        buffer = (ctypes.c_uint8 * nbytes)()
        ctypes.memset(buffer, 0xFF, nbytes)  # NaN: nothing may count on zeros
        address = ctypes.addressof(buffer)
        self.live[address] = buffer
        return address

    def _block(self, address):
        return next((a, b) for a, b in self.live.items() if a <= address < a + len(b))

    def _check(self, address, nbytes):
        start, block = self._block(address)
        assert address + nbytes <= start + len(block), f"{nbytes} bytes at {address - start} of {len(block)}"
        return address

    # modules and launches
    def cuModuleLoadData(self, code):
        key = code[4:].decode() if code[:4] == b"\x7fELF" else code.rstrip(b"\0").decode().split()[-1]
        if key not in self.variants:
            return Result.CUDA_ERROR_NO_BINARY_FOR_GPU, None
        self.loaded.append(code)
        return OK, key

    def cuModuleUnload(self, module):
        return (OK,)

    def cuModuleGetFunction(self, module, name):
        assert name.decode() == self.variants[module].kernel.split(".")[1]
        return OK, module

    def cuFuncSetAttribute(self, function, attribute, value):
        self._shared[function] = value
        return (OK,)

    def cuLaunchKernelEx(self, config, function, params, extra):
        variant, grid = self.variants[function], (config.gridDimX, config.gridDimY, config.gridDimZ)
        assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (32 * variant.num_warps, 1, 1)
        assert config.sharedMemBytes <= self._shared.get(function, 48 << 10)
        assert bool(config.numAttrs) == variant.constants.get("PDL", False)
        slots = (ctypes.c_void_p * (len(variant.types) + 2)).from_address(params)
        args = {n: self._argument(slots[i], kind) for i, (n, kind) in enumerate(variant.types.items())}
        for extra_slot in slots[len(variant.types) :]:  # Triton's scratch pointers
            assert ctypes.c_uint64.from_address(extra_slot).value == 0
        return self._do(lambda: interpret.call(variant, grid, args))

    def _argument(self, slot, kind):
        if kind == "i32":
            return ctypes.c_int32.from_address(slot).value
        if kind == "fp32":
            return ctypes.c_float.from_address(slot).value
        address = ctypes.c_uint64.from_address(slot).value
        assert address % 16 == 0, "pointers are promised to be aligned"
        start, block = self._block(address)
        rest = (len(block) - (address - start)) // 4 * 4
        raw = (ctypes.c_uint8 * rest).from_address(address)
        return torch.frombuffer(raw, dtype=interpret.TORCH[kind[1:]])

    def _do(self, work):
        if self._capturing is None:
            work()
        else:
            self._capturing.append(work)
        return (OK,)

    # streams, graphs, events
    def cuStreamCreate(self, flags):
        return OK, 7

    def cuStreamDestroy(self, stream):
        return (OK,)

    def cuStreamSynchronize(self, stream):
        assert self._capturing is None, "a capture may not wait"
        return (OK,)

    def cuStreamBeginCapture(self, stream, mode):
        self._capturing = []
        return (OK,)

    def cuStreamEndCapture(self, stream):
        graph, self._capturing = self._capturing, None
        return OK, graph

    def cuGraphInstantiate(self, graph, flags):
        return OK, list(graph)

    def cuGraphDestroy(self, graph):
        return (OK,)

    cuGraphExecDestroy = cuGraphDestroy

    def cuGraphLaunch(self, graph, stream):
        for work in graph:
            work()
        return (OK,)

    def cuEventCreate(self, flags):
        return OK, "event"

    def cuEventRecord(self, event, stream):
        return (OK,)

    def cuEventSynchronize(self, event):
        return (OK,)

    def cuEventElapsedTime(self, begin, end):
        return OK, 1.0

    def cuEventDestroy(self, event):
        return (OK,)
