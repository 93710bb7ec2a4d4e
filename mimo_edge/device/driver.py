"""What a GPU's driver takes beside the arrays that are asked of it, counted without a GPU.

Fitted to one NVIDIA H200 (driver 580.159.04, docs/device.md): three models, of which it explains all bytes of two, and
is 2 MiB above the third. An Orin's driver may differ; its units are assumed to be the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from mimo_edge.backends import cuda_heads
from mimo_edge.backends.cuda_memory import CHUNK, UNIT, taken
from mimo_edge.backends.cuda_steps import pieces_of
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.kv.layout import KvLayout

# A stream costs one unit; code as much as the cubins' files; a kernel in a captured graph about so much. The last is
# the uncertain one: what graphs took were 0, 1 and 2 units, of 1,086, 1,390 and 1,895 nodes.
STREAM, NODE = UNIT, 2 << 10
# Of a model without kernels yet: cubins of 2.4 to 3.9 MB; nodes a layer, and a layer and MTP head (within 20 %).
CODE, LAYER_NODES, HEAD_NODES = 3_000_000, 45, 20


@dataclass(frozen=True)
class Overhead:
    """Bytes that allocations are rounded up by, bytes of kernels' code, kernels in captured graphs."""

    rounding: int
    code: int
    nodes: int

    @property
    def total(self) -> int:
        """The code, the graphs and the stream are taken in whole units."""
        return self.rounding + -(-(STREAM + self.code + NODE * self.nodes) // UNIT) * UNIT


def of_programs(programs: ProgramSet, layout: KvLayout, code: int) -> Overhead:
    """Of the cuda backend with this layout, `code` being the bytes of its cubins."""
    weights = {n: b.nbytes for n, b in programs.buffers.items() if b.role == "weight"}
    kept = programs.with_heads(layout.heads)
    arenas = [weights, *pieces_of(kept, layout).values()]
    return Overhead(sum(taken(a) - sum(a.values()) for a in arenas), code, cuda_heads.nodes(kept))


def by_shape(layers: int, heads: int, arenas: list[int]) -> Overhead:
    """About, of arenas of so many bytes: every one of their chunks wastes half a unit, the inputs a whole one."""
    chunks = sum(-(-nbytes // CHUNK) for nbytes in arenas)
    return Overhead(UNIT + chunks * UNIT // 2, CODE, layers * (LAYER_NODES + HEAD_NODES * heads))
