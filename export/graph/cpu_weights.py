"""Weights of the CPU form: by reference into the weights file, in the ops ONNX Runtime is fast at."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mimo_edge.export.graph.builder import FLOAT, UINT8, GraphBuilder
from mimo_edge.params import Param, parameters
from mimo_edge.spec import ModelSpec, TensorQuant

MS = "com.microsoft"
# ONNX Runtime repacks one initializer at a time and holds both copies of it: the head in pieces keeps that peak small.
HEAD_PIECE_BYTES = 16 << 20

Entry = tuple[str, tuple[int, ...], int, int]  # dtype, shape, absolute offset, bytes


class CpuWeights:
    """Emits lookups and products with the model's parameters into a graph (or a branch of it)."""

    def __init__(self, spec: ModelSpec, header: Mapping[str, Entry], accuracy_level: int, location: str):
        self._spec = spec
        self._header = header
        self._accuracy_level = accuracy_level
        self._location = location
        self._params = {p.name: p for p in parameters(spec)}

    def vector(self, g: GraphBuilder, name: str) -> str:
        """A float parameter of any rank as it is."""
        return self._slice(g, name, FLOAT, self._header[name][1], 0, self._header[name][1][0])

    def embedding(self, g: GraphBuilder, tokens: str) -> str:
        """Rows of the embedding for tokens int64 [T]: float32 [T, hidden]."""
        param = self._params["embed"]
        quant = self._spec.quant.of(param.kind)
        if quant is None:
            return g.op("Gather", self.vector(g, "embed"), tokens, name="embed.rows", axis=0)
        parts = self._parts(g, param, quant, 0, param.shape[0], flat=True)
        if param.shape[1] // quant.group * quant.bits % 8:
            return self._dequantised_rows(g, tokens, parts, param.shape[1], quant)
        return g.op(
            "GatherBlockQuantized", parts[0], tokens, *parts[1:], name="embed.rows", domain=MS,
            shape=["T", param.shape[1]], bits=quant.bits, block_size=quant.group, gather_axis=0, quantize_axis=1,
        )  # fmt: skip

    def _dequantised_rows(
        self, g: GraphBuilder, tokens: str, parts: tuple[str, str, str], k: int, quant: TensorQuant
    ) -> str:
        """The same in standard ops: GatherBlockQuantized of ONNX Runtime 1.23, the last for Python 3.10, reads wrong
        zeros where a row of them ends on half a byte."""
        q, scales, zeros = (g.op("Gather", part, tokens, name="embed.part", axis=0) for part in parts)
        groups = k // quant.group
        levels = g.op("Reshape", _nibbles(g, q), g.constant([-1, groups, quant.group]), name="embed.levels")
        zero = g.op("Slice", _nibbles(g, zeros), g.constant([0]), g.constant([groups]), g.constant([1]))
        level = g.op("Sub", levels, g.op("Unsqueeze", zero, g.constant([2])), name="embed.level")
        rows = g.op("Mul", level, g.op("Unsqueeze", scales, g.constant([2])), name="embed.scaled")
        return g.op("Reshape", rows, g.constant([-1, k]), name="embed.rows")

    def linear(self, g: GraphBuilder, x: str, name: str, *, rows: str | int = "T", bias: str | None = None) -> str:
        """x [rows, K] times the transposed parameter [N, K], plus a bias parameter [N]: float32 [rows, N]."""
        return self._product(g, x, self._params[name], 0, self._params[name].shape[0], rows, bias)

    def head(self, g: GraphBuilder, x: str, rows: str | int) -> str:
        """Logits float32 [rows, vocab] of x [rows, hidden], the output `logits`."""
        param = self._params["head" if self._spec.separate_head else "embed"]
        vocab, nbytes = param.shape[0], sum(self._header[n][3] for n in self._names(param))
        pieces = -(-nbytes // HEAD_PIECE_BYTES)
        step = -(-vocab // pieces)
        parts = [
            self._product(g, x, param, first, min(first + step, vocab), rows, None) for first in range(0, vocab, step)
        ]
        return g.op("Concat", *parts, outputs=["logits"], axis=1)

    def _names(self, param: Param) -> list[str]:
        if self._spec.quant.of(param.kind) is None:
            return [param.name]
        return [f"{param.name}.{part}" for part in ("q", "scales", "zeros")]

    def _product(
        self, g: GraphBuilder, x: str, param: Param, first: int, last: int, rows: str | int, bias: str | None
    ) -> str:
        k = param.shape[1]
        quant = self._spec.quant.of(param.kind)
        if quant is None:
            weight = self._slice(g, param.name, FLOAT, (last - first, k), first, last)
            extra = [self.vector(g, bias)] if bias else []
            return g.op("Gemm", x, weight, *extra, name=f"{param.name}.product", transB=1)
        inputs = [x, *self._parts(g, param, quant, first, last)] + (["", self.vector(g, bias)] if bias else [])
        return g.op(
            "MatMulNBits", *inputs, name=f"{param.name}.product", domain=MS, shape=[rows, last - first],
            K=k, N=last - first, bits=quant.bits, block_size=quant.group, accuracy_level=self._accuracy_level,
        )  # fmt: skip

    def _parts(
        self, g: GraphBuilder, param: Param, quant: TensorQuant, first: int, last: int, flat: bool = False
    ) -> tuple[str, str, str]:
        """q, scales and zeros of rows [first, last); `flat` gives q as [N, K*bits/8] without an axis for groups."""
        n, groups = last - first, param.shape[1] // quant.group
        group_bytes = quant.group * quant.bits // 8
        zeros_bytes = -(-groups * quant.bits // 8)
        q_shape = (n, groups * group_bytes) if flat else (n, groups, group_bytes)
        return (
            self._slice(g, f"{param.name}.q", UINT8, q_shape, first, last),
            self._slice(g, f"{param.name}.scales", FLOAT, (n, groups), first, last),
            self._slice(g, f"{param.name}.zeros", UINT8, (n, zeros_bytes), first, last),
        )

    def _slice(self, g: GraphBuilder, stored: str, dtype: int, shape: tuple[int, ...], first: int, last: int) -> str:
        """Rows [first, last) of a stored tensor as an initializer of `shape`; one initializer a distinct view."""
        _, whole, offset, nbytes = self._header[stored]
        row_bytes = nbytes // whole[0]
        name = stored if (first, shape) == (0, tuple(whole)) else f"{stored}[{first}:{last}]x{len(shape)}"
        return g.external(name, dtype, shape, self._location, offset + first * row_bytes, (last - first) * row_bytes)


def _nibbles(g: GraphBuilder, packed: str) -> str:
    """uint8 [T, B], low nibble first -> float32 [T, 2B]."""
    halves = [
        g.op("BitwiseAnd", packed, g.constant(np.uint8(15))),
        g.op("BitShift", packed, g.constant(np.uint8(4)), direction="RIGHT"),
    ]
    columns = [g.op("Unsqueeze", half, g.constant([2])) for half in halves]
    pairs = g.op("Reshape", g.op("Concat", *columns, axis=2), g.constant([0, -1]))
    return g.op("Cast", pairs, to=FLOAT)
