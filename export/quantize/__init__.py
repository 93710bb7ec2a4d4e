"""Quantisers: float32 rows -> stored tensors, chosen by name."""

from mimo_edge.export.quantize.rtn import quantize_rows

METHODS = {"rtn": quantize_rows}
