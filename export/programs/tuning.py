"""How kernels are cut for a class of device: kernels/tuned/sm_NN.json, measured or reasoned.

{"attention": {fields of windowed_attention's Tuning}, "products": {op: [rules]}}   (int4_linear/variants.py, `choose`)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from mimo_edge import kernels
from mimo_edge.kernels.int4_linear.variants import Tuned, TunedMany, choose, choose_many
from mimo_edge.kernels.windowed_attention.variants import Tuning as AttentionTuning


@dataclass(frozen=True)
class Tuning:
    """`products` maps linear, gate_up, head, gate_up_listed, down_listed and many to rules; others get the default."""

    attention: AttentionTuning = field(default_factory=AttentionTuning)
    products: dict[str, list[dict[str, int]]] = field(default_factory=dict)

    def product(self, op: str, n: int, k: int) -> Tuned:
        return choose(self.products.get(op, []), n, k)

    def many(self, rows: int) -> TunedMany:
        return choose_many(self.products.get("many", []), rows)


def tuning(target: str) -> Tuning:
    """The table of a target, "sm_87"; a target without one gets the defaults."""
    path = Path(kernels.__file__).parent / "tuned" / f"{target}.json"
    if not path.is_file():
        return Tuning()
    data = json.loads(path.read_text())
    return Tuning(AttentionTuning(**data.get("attention", {})), data.get("products", {}))
