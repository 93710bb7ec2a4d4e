"""Arrays handed to and taken from other libraries. Host memory stands in for the GPU's where DLPack can say so."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mimo_edge.backends import cuda_array
from mimo_edge.backends.cuda_array import DeviceArray, device_array
from mimo_edge.errors import BadInputError

CPU = 1  # DLPack's device type of host memory


def on_host(values: np.ndarray) -> DeviceArray:
    return DeviceArray(values.ctypes.data, values.shape, values.dtype, owner=values, kind=CPU)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint8])
def test_dlpack_hands_the_same_memory_out_and_takes_it_back(dtype):
    values = np.random.default_rng().integers(0, 100, (3, 5)).astype(dtype)
    tensor = torch.from_dlpack(on_host(values))
    assert tensor.data_ptr() == values.ctypes.data and np.array_equal(tensor.numpy(), values)
    tensor[1, 2] = 77
    assert values[1, 2] == 77
    back = device_array(tensor)
    assert (back.address, back.shape, back.dtype) == (values.ctypes.data, (3, 5), values.dtype)


def test_memory_lives_as_long_as_its_borrower():
    before = len(cuda_array._lent)
    tensor = torch.from_dlpack(on_host(np.arange(6, dtype=np.float32)))
    gc.collect()
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
    del tensor
    gc.collect()
    assert len(cuda_array._lent) == before


def test_a_capsule_nobody_takes_is_freed():
    before = len(cuda_array._lent)
    capsule = on_host(np.zeros(3, np.float32)).__dlpack__()
    assert len(cuda_array._lent) == before + 1
    del capsule
    gc.collect()
    assert len(cuda_array._lent) == before


def test_a_borrowed_tensor_is_given_back():
    tensor = torch.arange(4.0)
    array = device_array(tensor)
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    assert array.address == address
    assert torch.from_dlpack(DeviceArray(address, (4,), array.dtype, owner=array, kind=CPU)).tolist() == [0, 1, 2, 3]


def test_cuda_array_interface_both_ways():
    ours = DeviceArray(4096, (2, 3), np.dtype("<f2"), stream=7)
    theirs = SimpleNamespace(__cuda_array_interface__=ours.__cuda_array_interface__)
    got = device_array(theirs)
    assert (got.address, got.shape, got.dtype, got.stream) == (4096, (2, 3), np.dtype("<f2"), 7)
    assert ours.__cuda_array_interface__["version"] == 3 and ours.nbytes == 12


@pytest.mark.parametrize("strides", [(12, 4), None])
def test_contiguous_strides_are_accepted(strides):
    interface = {"shape": (2, 3), "typestr": "<f4", "data": (64, False), "strides": strides, "version": 3}
    assert device_array(SimpleNamespace(__cuda_array_interface__=interface)).shape == (2, 3)


def test_what_is_refused():
    transposed = {"shape": (2, 3), "typestr": "<f4", "data": (64, False), "strides": (4, 8), "version": 3}
    with pytest.raises(BadInputError, match="contiguous"):
        device_array(SimpleNamespace(__cuda_array_interface__=transposed))
    with pytest.raises(BadInputError, match="contiguous"):
        device_array(torch.zeros(4, 5).T)
    with pytest.raises(BadInputError, match="list is no array on a GPU"):
        device_array([1, 2])
    with pytest.raises(BadInputError, match="type code"):
        device_array(torch.zeros(3, dtype=torch.bfloat16))
