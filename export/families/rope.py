"""Rotary embedding fields of a Hugging Face config, old form (rope_theta, rope_scaling) and new (rope_parameters)."""

from __future__ import annotations

from dataclasses import dataclass

from mimo_edge.errors import UnsupportedError
from mimo_edge.export.families.fields import Fields
from mimo_edge.spec import RopeScaling


@dataclass(frozen=True)
class Rope:
    """`partial` is the share of a head's dimensions that is rotated."""

    theta: float
    scaling: RopeScaling | None
    partial: float

    def dims(self, head_dim: int) -> int:
        """Rotated dimensions, rounded down as transformers does (192 * 0.334 -> 64)."""
        return int(head_dim * self.partial)


def read_rope(config: Fields, layer_type: str = "full_attention", theta: float | None = None) -> Rope:
    """Rotary parameters of one layer type. `theta` is the family's default; without one the field is required."""
    both = config.sub("rope_parameters")
    fields = both.sub(layer_type) or both if both and both.has(layer_type) else both
    if fields is None or not fields.has("rope_theta"):
        base = config.number("rope_theta") if theta is None else config.number("rope_theta", theta)
    else:
        base = fields.number("rope_theta")
    partial = config.number("partial_rotary_factor", 1.0)
    if fields is not None:
        partial = fields.number("partial_rotary_factor", partial)
    return Rope(base, read_scaling(fields) or read_scaling(config.sub("rope_scaling")), partial)


def read_scaling(fields: Fields | None) -> RopeScaling | None:
    """Raises UnsupportedError for yarn, dynamic, longrope and anything else that is not linear or llama3."""
    if fields is None:
        return None
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", fields.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            fields.number("factor"),
            fields.number("low_freq_factor"),
            fields.number("high_freq_factor"),
            fields.integer("original_max_position_embeddings"),
        )
    raise UnsupportedError(f"{fields.where}: rope_type {kind!r} is not supported (supported: default, linear, llama3)")
