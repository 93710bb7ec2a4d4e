"""What a compiled kernel is and how it is launched. Plain data, without Triton or PyTorch: a device reads it from JSON.

A model step is a list of launches over named buffers (a Program). Everything that depends on the model is decided when
the program is made; what depends on the request (lengths, tables, tokens) is read by kernels from device memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Literal

Value = int | float | bool
DType = Literal["fp16", "fp32", "i32", "u8"]
Role = Literal["weight", "kv", "input", "output", "scratch"]
Per = Literal["step", "page", "ring"]
ITEM_BYTES: dict[str, int] = {"fp16": 2, "fp32": 4, "i32": 4, "u8": 1}


@dataclass(frozen=True)
class Variant:
    """One kernel with its compile-time constants.

    `kernel` is "<op>.<function>": the function in kernels/<op>/triton.py. `types` maps every argument that is not a
    constant, in order, to its Triton type ("*fp16", "*fp32", "*i32", "*u8", "i32", "fp32").
    Pointers are aligned to 16 bytes.
    """

    kernel: str
    types: dict[str, str]
    constants: dict[str, Value]
    num_warps: int = 4
    num_stages: int = 2

    @property
    def key(self) -> str:
        """Names the variant: equal keys are equal code."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.kernel}.{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Launch:
    """One launch: `args` maps the variant's arguments to a buffer's name (pointers) or a number (scalars)."""

    variant: Variant
    grid: tuple[int, int, int]
    args: dict[str, str | int | float]


@dataclass(frozen=True)
class Buffer:
    """Device memory by name. `fill` is the value of every byte before the first launch (pools and counters: 0).

    Pools grow with the engine's capacity: `per` says of what their first dimension, here 1, counts the blocks: pages
    of a full layer, or rings of a window layer.
    """

    dtype: DType
    shape: tuple[int, ...]
    role: Role
    fill: int | None = None
    per: Per = "step"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Program:
    """The launches of one kind of step, in order, and those that store a long step's rows once they are accepted."""

    rows: int
    launches: tuple[Launch, ...]
    commit: tuple[Launch, ...] = ()
    buffers: dict[str, Buffer] = field(default_factory=dict)
