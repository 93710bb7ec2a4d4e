"""Launches of the norms for a size. Plain Python: no Triton here."""

from __future__ import annotations

from mimo_edge.kernels.launch import Launch, Variant


def rms_norm(rows: int, n: int, eps: float, *, x: str, w: str, y: str) -> Launch:
    """y fp16 [rows, n] = norm of x fp32 [rows, n] times w fp32 [n]."""
    variant = _variant("norm.rms_norm", {"x": "*fp32", "w": "*fp32", "y": "*fp16"}, n, eps)
    return Launch(variant, (rows, 1, 1), {"x": x, "w": w, "y": y})


def add_norm(rows: int, n: int, eps: float, *, y: str, w: str, x: str) -> Launch:
    """x fp32 [rows, n] += norm of y fp16 [rows, n] times w fp32 [n]."""
    variant = _variant("norm.add_norm", {"y": "*fp16", "w": "*fp32", "x": "*fp32"}, n, eps)
    return Launch(variant, (rows, 1, 1), {"y": y, "w": w, "x": x})


def _variant(kernel: str, types: dict[str, str], n: int, eps: float) -> Variant:
    columns = 1 << (n - 1).bit_length()
    warps = min(16, max(1, columns // 512))  # 16 numbers a thread
    return Variant(kernel, types, {"N": n, "EPS": eps, "COLUMNS": columns}, num_warps=warps)
