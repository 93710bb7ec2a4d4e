"""Launches of MTP heads' own kernels, for a size; one sequence. Plain Python: no Triton here."""

from __future__ import annotations

from mimo_edge.kernels.launch import Launch, Value, Variant
from mimo_edge.spec import MtpSpec, TensorQuant

_COLUMNS = 1024  # a program of `keep`


def pair(
    rows: int,
    n: int,
    k: int,
    quant: TensorQuant,
    spec: MtpSpec,
    eps: float,
    ring: int,
    *,
    tokens: str,
    first: int,
    embed: str,
    scale: float,
    hidden: str,
    table: str,
    positions: str,
    token_norm: str,
    hidden_norm: str,
    final_norm: str,
    y: str,
) -> Launch:
    """y fp16 [rows, 2 k], what a head's projection sees (reference.py), of rows at positions i32 [rows], -1 for none.

    Tokens i32 from `first` on, looked up in the packed table `embed` [n, k] times `scale`; hidden fp32
    [rings, ring, k], table i32 [1, 1]; norms fp32 [k], of which final_norm is used where heads see states
    behind the final norm.
    """
    columns = 1 << (k - 1).bit_length()
    constants: dict[str, Value] = {
        "N": n,
        "K": k,
        "G": quant.group,
        "BITS": quant.bits,
        "SCALE": scale,
        "RING": ring,
        "POST_NORM": spec.hidden == "post_norm",
        "TOKEN_FIRST": spec.order == "token_first",
        "ZERO_FIRST": spec.zero_first,
        "EPS": eps,
        "COLUMNS": columns,
    }
    types = {"tokens": "*i32", "q": "*i32", "scales": "*fp16", "zeros": "*u8", "hidden": "*fp32", "table": "*i32"}
    types |= {"positions": "*i32", "token_norm": "*fp32", "hidden_norm": "*fp32", "final_norm": "*fp32", "y": "*fp16"}
    args: dict[str, str | int | float] = {
        "tokens": tokens,
        "q": f"{embed}.q",
        "scales": f"{embed}.scales",
        "zeros": f"{embed}.zeros",
        "hidden": hidden,
        "table": table,
        "positions": positions,
        "token_norm": token_norm,
        "hidden_norm": hidden_norm,
        "final_norm": final_norm,
        "y": y,
        "first": first,
    }
    warps = min(8, max(1, columns // 256))
    return Launch(Variant("mtp.pair", types | {"first": "i32"}, constants, warps), (rows, 2, 1), args)


def keep(
    rows: int,
    k: int,
    ring: int,
    *,
    x: str,
    hidden: str,
    positions: str,
    lengths: str,
    counts: str,
    table: str,
    counted: bool,
) -> Launch:
    """Stores rows x fp32 [rows, k] at their positions in the ring of hidden fp32 [rings, ring, k].

    `counted`: only those of the first counts i32 [1] rows behind lengths i32 [1], and of these the newest that fit;
    otherwise all rows, at most `ring`.
    """
    columns = min(_COLUMNS, 1 << (k - 1).bit_length())
    constants: dict[str, Value] = {"K": k, "RING": ring, "COUNTED": counted, "COLUMNS": columns}
    types = {"x": "*fp32", **dict.fromkeys(("positions", "lengths", "counts", "table"), "*i32"), "hidden": "*fp32"}
    args = {"x": x, "positions": positions, "lengths": lengths, "counts": counts, "table": table, "hidden": hidden}
    return Launch(Variant("mtp.keep", types, constants), (rows, -(-k // columns), 1), {**args})
