"""Arrays in device memory, handed to and taken from other libraries without copies.

Out and in: __cuda_array_interface__ version 3 (PyTorch, CuPy, pycuda, Numba;
https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html) and DLPack (https://dmlc.github.io/dlpack/latest/).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mimo_edge.errors import BadInputError

CUDA, CUDA_MANAGED = 2, 13  # DLDeviceType
_NAME, _USED = b"dltensor", b"used_dltensor"
_CODES = {"i": 0, "u": 1, "f": 2}


class _Tensor(ctypes.Structure):  # DLTensor, with DLDevice and DLDataType written out
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):  # DLManagedTensor
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_raw_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.restype, _rename.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)

_lent: dict[int, tuple] = {}  # address of a _Managed -> what must live as long as its borrower wants it


@dataclass(frozen=True)
class DeviceArray:
    """Contiguous memory at `address`, valid while `owner` lives; `stream` is the CUDA stream its contents follow."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    device: int = 0
    owner: Any = field(default=None, repr=False)
    stream: int | None = None
    kind: int = CUDA

    @property
    def place(self) -> str:
        """Where the memory is, in words."""
        return f"GPU {self.device}" if self.kind in (CUDA, CUDA_MANAGED) else "another kind of device"

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "stream": self.stream,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, self.device

    def __dlpack__(self, stream: int | None = None, **_: Any) -> Any:
        """A capsule; contents are complete when the backend's call that made them has returned."""
        n = len(self.shape)
        shape = (ctypes.c_int64 * n)(*self.shape)
        code, bits = _CODES[self.dtype.kind], 8 * self.dtype.itemsize
        tensor = _Tensor(self.address, self.kind, self.device, n, code, bits, 1, shape, None, 0)
        managed = _Managed(tensor, None, _delete)
        _lent[ctypes.addressof(managed)] = (self, shape, managed)
        return _new(ctypes.addressof(managed), _NAME, _destroy)


@_Deleter
def _delete(managed: Any) -> None:
    _lent.pop(ctypes.addressof(managed.contents), None)


@_Destructor
def _destroy(capsule: int) -> None:
    if _is_valid(capsule, _NAME):  # nobody took the tensor
        _lent.pop(_raw_pointer(capsule, _NAME), None)


def device_array(source: Any) -> DeviceArray:
    """A contiguous array of another library, in device memory. Raises BadInputError when it is something else."""
    if isinstance(source, DeviceArray):
        return source
    if hasattr(source, "__cuda_array_interface__"):
        return _from_interface(source, source.__cuda_array_interface__)
    if hasattr(source, "__dlpack__"):
        return _from_dlpack(source)
    raise BadInputError(
        f"a {type(source).__name__} is no array on a GPU: give one with __cuda_array_interface__ or __dlpack__ "
        "(PyTorch, CuPy, pycuda)"
    )


def _from_interface(source: Any, data: dict[str, Any]) -> DeviceArray:
    dtype, shape = np.dtype(data["typestr"]), tuple(data["shape"])
    _need_contiguous(shape, data.get("strides"), dtype.itemsize)
    return DeviceArray(int(data["data"][0]), shape, dtype, owner=source, stream=data.get("stream"))


def _from_dlpack(source: Any) -> DeviceArray:
    kind, device = source.__dlpack_device__()
    capsule = source.__dlpack__()
    address = _pointer(capsule, _NAME)
    managed = _Managed.from_address(address)
    t = managed.tensor
    letter = {code: letter for letter, code in _CODES.items()}.get(t.code)
    if letter is None or t.lanes != 1:
        raise BadInputError(f"a DLPack tensor of type code {t.code}: give integers or floats")
    dtype, shape = np.dtype(f"{letter}{t.bits // 8}"), tuple(t.shape[i] for i in range(t.ndim))
    strides = tuple(t.strides[i] * dtype.itemsize for i in range(t.ndim)) if t.strides else None
    _need_contiguous(shape, strides, dtype.itemsize)
    _rename(capsule, _USED)
    owner = _Borrowed(managed)
    return DeviceArray(t.data + t.byte_offset, shape, dtype, device, owner, None, kind)


class _Borrowed:
    """Gives a tensor back to the library that lent it."""

    def __init__(self, managed: _Managed):
        self._managed = managed

    def __del__(self) -> None:
        if self._managed.deleter:
            self._managed.deleter(ctypes.byref(self._managed))


def _need_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, item: int) -> None:
    expected = tuple(item * int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    if strides is not None and any(s != e for s, e, n in zip(strides, expected, shape, strict=True) if n > 1):
        raise BadInputError(f"an array of shape {shape} with strides {strides}: give a contiguous one")
