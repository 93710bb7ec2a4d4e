"""Queues an op's work on addresses: what a plugin does when TensorRT calls it. No TensorRT here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from mimo_edge.errors import MimoEdgeError
from mimo_edge.kernels.launch import ITEM_BYTES, Buffer, Launch
from mimo_edge.trt_plugins.op import Copy, Op, Tensor

_ALIGN = 256


class Launcher(Protocol):
    """The device as plugins see it; backends/tensorrt.py has the real one. Everything is queued on `stream`."""

    def launch(self, launch: Launch, address: Mapping[str, int], stream: int) -> None: ...

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None: ...

    def fill(self, to: int, byte: int, nbytes: int, stream: int) -> None: ...


def rows_of(op: Op, shapes: Sequence[Sequence[int]]) -> int:
    """The rows of a step (or of its logits), from the shapes of the op's inputs."""
    return sizes_of(op.inputs(), shapes).get(_varying(op), 1)


def sizes_of(tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The named dimensions. Raises MimoEdgeError naming the tensor whose shape is not the op's."""
    sizes: dict[str, int] = {}
    for t, shape in zip(tensors, shapes, strict=True):
        for want, got in zip(t.shape, shape, strict=True):
            if isinstance(want, str):
                want = sizes.setdefault(want, got)
            if want != got:
                raise MimoEdgeError(f"{t.name} is {list(shape)} (allowed: {list(t.shape)})")
    return sizes


def _varying(op: Op) -> str:
    return next(d for t in op.inputs() for d in t.shape if d in ("rows", "logit_rows"))  # type: ignore[return-value]


def scratch_places(scratch: Mapping[str, Buffer]) -> tuple[dict[str, int], int]:
    """Offset of each buffer in a workspace, and the workspace's bytes."""
    places, total = {}, 0
    for name, b in scratch.items():
        places[name] = total
        total += -(-b.nbytes // _ALIGN) * _ALIGN
    return places, total


def queue(
    op: Op,
    launcher: Launcher,
    shapes: Sequence[Sequence[int]],
    inputs: Sequence[int],
    outputs: Sequence[int],
    workspace: int,
    stream: int,
) -> None:
    """Queues what a step with inputs of these shapes does; `inputs` and `outputs` are addresses.

    Raises MimoEdgeError when shapes are not the op's, when the past and the present of a pool are not one memory, or
    when the bundle has no kernels for so many rows.
    """
    address = {t.name: at for t, at in zip((*op.inputs(), *op.outputs()), (*inputs, *outputs), strict=True)}
    for out, given in op.in_place().items():
        if address[out] != address[given]:
            raise MimoEdgeError(f"plugin {op.kind}: {out} must be bound to the memory of {given}")
    sizes = sizes_of(op.inputs(), shapes)
    rows = sizes[_varying(op)]
    scratch = op.scratch(rows)
    places, _ = scratch_places(scratch)
    address |= {name: workspace + at for name, at in places.items()}
    for name, b in scratch.items():
        if b.fill is not None:
            launcher.fill(address[name], b.fill, b.nbytes, stream)
    for item in work_of(op, rows):
        if isinstance(item, Copy):
            tensor = next(t for t in op.outputs() if t.name == item.to)
            launcher.copy(address[item.to], address[item.source], _bytes(tensor, sizes), stream)
        else:
            launcher.launch(item, address, stream)


def work_of(op: Op, rows: int) -> Sequence[Launch | Copy]:
    """The op's work; a step of other rows than the bundle's kernels have is a MimoEdgeError."""
    try:
        return op.work(rows)
    except ValueError as e:
        raise MimoEdgeError(f"plugin {op.kind}: {e}") from None


def _bytes(tensor: Tensor, sizes: Mapping[str, int]) -> int:
    dims = [d if isinstance(d, int) else sizes[d] for d in tensor.shape]
    return math.prod(dims) * ITEM_BYTES["u8" if tensor.type == "i8" else tensor.type]
