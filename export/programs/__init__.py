"""A model for the cuda backend: its weights as the kernels read them, and the launches of every kind of step."""

from mimo_edge.export.programs.bundle import add_kernels, capability, device_bytes, retarget, write_tensorrt
from mimo_edge.export.programs.lower import PREFILL_ROWS, check_supported, lower
from mimo_edge.export.programs.weights import device_weights, write_device_weights

__all__ = [
    "PREFILL_ROWS",
    "add_kernels",
    "capability",
    "check_supported",
    "device_bytes",
    "device_weights",
    "lower",
    "retarget",
    "write_device_weights",
    "write_tensorrt",
]
