"""Single launches in Triton's interpreter, on poisoned CPU tensors."""

import torch
from interpret import TORCH, call

from mimo_edge.kernels.launch import Buffer, Launch


def run(tensors: dict[str, torch.Tensor], *launches: Launch) -> None:
    """Launches in order; `tensors` maps buffer names to contiguous tensors."""
    for launch in launches:
        args = {k: tensors[v] if isinstance(v, str) else v for k, v in launch.args.items()}
        assert all(v.is_contiguous() for v in args.values() if isinstance(v, torch.Tensor)), launch.variant.kernel
        call(launch.variant, launch.grid, args)


def allocate(buffers: dict[str, Buffer]) -> dict[str, torch.Tensor]:
    """Tensors for buffers: filled as they say, every byte 255 (NaN in floats) where they do not."""
    tensors = {}
    for name, b in buffers.items():
        tensors[name] = torch.empty(b.shape, dtype=TORCH[b.dtype])
        tensors[name].view(torch.uint8).fill_(255 if b.fill is None else b.fill)
    return tensors
