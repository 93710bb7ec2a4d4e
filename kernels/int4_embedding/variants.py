"""Launches of Int4Embedding. `w` stands for the buffers of `int4_linear.layout.shapes`, as a tied head uses them."""

from __future__ import annotations

from mimo_edge.kernels.launch import Launch, Variant
from mimo_edge.spec import TensorQuant

_COLUMNS = 1024  # a program


def embed(
    rows: int,
    n: int,
    k: int,
    quant: TensorQuant,
    *,
    tokens: str,
    w: str,
    y: str,
    scale: float = 1.0,
    first: int = 0,
) -> tuple[Launch, ...]:
    """y float32 [rows, k] = table[tokens int32, `rows` of them from `first` on] * scale. Tokens outside 0..n-1 give a
    row of 0."""
    variant = Variant(
        "int4_embedding.embed",
        {"tokens": "*i32", "q": "*i32", "scales": "*fp16", "zeros": "*u8", "y": "*fp32", "first": "i32"},
        {"N": n, "K": k, "G": quant.group, "BITS": quant.bits, "SCALE": scale, "KB": _COLUMNS},
    )
    args: dict[str, str | int | float] = {
        "tokens": tokens,
        "q": f"{w}.q",
        "scales": f"{w}.scales",
        "zeros": f"{w}.zeros",
        "y": y,
        "first": first,
    }
    return (Launch(variant, (rows, -(-k // _COLUMNS), 1), args),)
