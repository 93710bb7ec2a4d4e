"""The `mimo` ops for onnx.reference, on the kernels' PyTorch references: runs the TensorRT form where there is none.

Pools come back as new arrays with all of a step's rows, long steps of window layers too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun
from torch import Tensor

from mimo_edge.kernels.norm.reference import add_norm, rms_norm
from mimo_edge.kernels.windowed_attention.reference import Shape, windowed_attention
from mimo_edge.trt_plugins import fields
from mimo_edge.trt_plugins.int4_gate_up import Int4GateUp
from mimo_edge.trt_plugins.int4_head import Int4Head
from mimo_edge.trt_plugins.int4_linear import Int4Linear
from mimo_edge.trt_plugins.ops import OPS
from mimo_edge.trt_plugins.sparse_ffn import SparseFfn
from mimo_edge.trt_plugins.windowed_attention import WindowedAttention

Named = dict[str, Tensor]


def unpack(q: NDArray, scales: NDArray, zeros: NDArray, n: int, stacked: int = 1) -> Tensor:
    """float32 [n, K] of a matrix in the device layout (int4_linear/layout.py), its q and zeros seen as int8."""
    tiles, chunks, chunk_bytes = q.shape
    bits = chunk_bytes // 128
    words = np.ascontiguousarray(q).view("<u4").reshape(tiles, chunks, bits // 4, 8, 4, 4)
    words = words.transpose(0, 5, 3, 1, 4, 2).reshape(tiles * 32, -1)  # row, words along K
    places = [bits * j + 16 * h for j in range(16 // bits) for h in range(2)]
    levels = np.stack([words >> np.uint32(at) & ((1 << bits) - 1) for at in places], -1).reshape(tiles * 32, -1)
    scale, zero = (_rows(a) for a in (scales.astype(np.float32), zeros.view(np.uint8).astype(np.float32)))
    groups = scale.shape[1]
    weights = (levels.reshape(tiles * 32, groups, -1) - zero[..., None]) * scale[..., None]
    rows = weights.reshape(stacked, -1, levels.shape[1])[:, : n // stacked]
    return torch.from_numpy(rows.reshape(n, -1).astype(np.float32))


def _rows(values: NDArray) -> NDArray:
    """[tiles, groups, 8 * 4] -> [rows, groups]."""
    tiles, groups, _ = values.shape
    return values.reshape(tiles, groups, 8, 4).transpose(0, 3, 2, 1).reshape(tiles * 32, groups)


class _Op(OpRun):
    """Decodes the op, unpacks its matrices, and calls `compute` with float32 tensors by name."""

    op_domain = "mimo"

    def _run(self, *inputs: NDArray, **attributes: Any) -> tuple[NDArray, ...]:
        op = fields.decode(OPS[type(self).__name__], self.onnx_node.name, attributes)
        arrays = dict(zip((t.name for t in op.inputs()), inputs, strict=True))
        half = next((arrays[t.name].dtype for t in op.inputs() if t.type == "fp16"), np.dtype(np.float16))
        types = {"fp16": half, "fp32": np.dtype(np.float32), "i32": np.dtype(np.int32)}
        results = self.compute(op, self.tensors(op, arrays), torch.from_numpy(np.zeros(0, half)).dtype)
        wanted = [types[t.type] for t in op.outputs()]
        return tuple(r.numpy().astype(t) for r, t in zip(results, wanted, strict=True))

    def tensors(self, op: Any, arrays: dict[str, NDArray]) -> Named:
        out = {name: torch.from_numpy(np.array(a)) for name, a in arrays.items() if "." not in name}
        rows = {"gate_up": 2 * getattr(op, "intermediate", 0), "down": getattr(op, "k", 0)}
        for matrix in {name.partition(".")[0] for name in arrays if "." in name}:
            q, scales, zeros = (arrays[f"{matrix}.{part}"] for part in ("q", "scales", "zeros"))
            stacked = 2 if matrix == "gate_up" or isinstance(op, Int4GateUp) else 1
            n = rows[matrix] if matrix in rows else 2 * op.intermediate if stacked == 2 else op.n
            out[matrix] = unpack(q, scales, zeros, n, stacked)
        return out

    def compute(self, op: Any, t: Named, half: torch.dtype) -> tuple[Tensor, ...]:
        raise NotImplementedError


class _Embedding(_Op):
    def compute(self, op: Any, t: Named, half: torch.dtype) -> tuple[Tensor, ...]:
        return (t["w"][t["tokens"].long()] * op.scale,)


class _Rotation(_Op):
    def compute(self, op: Any, t: Named, half: torch.dtype) -> tuple[Tensor, ...]:
        angles = t["positions"][:, None].float() * t["frequencies"]
        return (torch.stack([angles.cos(), angles.sin()], 1),)


class _Linear(_Op):
    def compute(self, op: Int4Linear, t: Named, half: torch.dtype) -> tuple[Tensor, ...]:
        x = rms_norm(t["x"], t["norm"], op.eps).to(half) if op.norm else t["x"]
        y = x.float() @ t["w"].T + t.get("bias", 0)
        if op.post_norm:
            return (add_norm(t["residual"], y.to(half), t["post_norm"], op.eps),)
        return (y + t.get("residual", 0),)


class _GateUp(_Op):
    def compute(self, op: Int4GateUp, t: Named, half: torch.dtype) -> tuple[Tensor, ...]:
        z = rms_norm(t["x"], t["norm"], op.eps).to(half).float()
        return (_activated(z, t["w"], op.activation),)


class _Sparse(_Op):
    def compute(self, op: SparseFfn, t: Named, half: torch.dtype) -> tuple[Tensor, ...]:
        z = rms_norm(t["x"], t["norm"], op.eps)
        keep = F.relu(z @ t["w1"].T) @ t["w2"].T + t["gate_bias"] > 0
        h = _activated(z.to(half).float(), t["gate_up"], op.activation)
        h = h.masked_fill(~keep.repeat_interleave(op.block, -1), 0).to(half).float()
        return (t["x"] + h @ t["down"].T + t.get("down_bias", 0),)


class _Head(_Op):
    def compute(self, op: Int4Head, t: Named, half: torch.dtype) -> tuple[Tensor, ...]:
        logits = rms_norm(t["x"], t["norm"], op.eps).to(half).float() @ t["w"].T
        width = 32 * op.cut[0]  # rows of the table a program
        parts = -(-op.n // width)
        padded = F.pad(logits, (0, parts * width - op.n), value=-torch.inf).unflatten(-1, (parts, -1))
        best, ids = padded.max(-1)
        return logits, best, ids + width * torch.arange(parts)


class _Attention(_Op):
    def compute(self, op: WindowedAttention, t: Named, half: torch.dtype) -> tuple[Tensor, ...]:
        """Norms and rotation here, as angles come from another op; the rest is the reference's."""
        a = op.spec
        q, k, v = t["qkv"].float().split([a.q_rows, a.k_rows, a.v_rows], -1)
        q, k = (_rotated(op, x, t.get(norm), t["rotation"]) for x, norm in ((q, "q_norm"), (k, "k_norm")))
        shape = Shape(a.heads, a.kv_heads, a.head_dim, a.v_head_dim, op.window, a.scale, a.value_scale, op.eps)
        names = ("k_pool", "v_pool", "positions", "sequences", "lengths", "table")
        given = torch.cat([q, k, v], -1), *(t[name] for name in names), torch.zeros(0), t.get("sinks")
        y, k_pool, v_pool = windowed_attention(shape, *given)
        new = (k, v * a.value_scale) if op.window else ()
        return y, k_pool, v_pool, *new


def _rotated(op: WindowedAttention, x: Tensor, norm: Tensor | None, rotation: Tensor) -> Tensor:
    """x [T, heads * head_dim], normed and turned by the angles."""
    x, half = x.unflatten(-1, (-1, op.head_dim)), op.rotary_dim // 2
    x = x if norm is None else rms_norm(x, norm, op.eps)
    cos, sin = rotation[:, None, 0, :half], rotation[:, None, 1, :half]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).flatten(1)


def _activated(z: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    gate, up = (z @ gate_up.T).chunk(2, -1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


_COMPUTE = {
    "Int4Embedding": _Embedding,
    "Rotation": _Rotation,
    "Int4Linear": _Linear,
    "Int4GateUp": _GateUp,
    "SparseFfn": _Sparse,
    "WindowedAttention": _Attention,
    "Int4Head": _Head,
}
REFERENCE_OPS: list[type[OpRun]] = [type(kind, (base,), {}) for kind, base in _COMPUTE.items()]
