"""What calibration found, and what it gives: quantisers and biases for any quantisation of the model.

What is kept of a product is one file in a temporary folder; weights are rounded again from it whenever they are asked
for, so that one calibration serves several formats and no second copy of the weights exists.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mimo_edge.export.quantize import gptq, rtn
from mimo_edge.export.quantize.gptq import Feedback
from mimo_edge.export.quantize.perplexity import Method, ReadySource, Source, read_restored
from mimo_edge.export.quantize.statistics import Range, Statistics
from mimo_edge.spec import ModelSpec, QuantSpec, TensorQuant

BIASED = (".o", ".down")  # products whose output may get a bias


@dataclass(frozen=True)
class Conditions:
    """The four conditions of calibration, each of which can be switched off, and how strongly inputs are trusted.

    stratified: every intent of the calibration text gets its share. no_clipping: a group's range holds all its weights.
    own_scales: activation scales for every product; off, one for the whole model. output_bias: the mean shift of
    attention's and the feed-forward's outputs is taken back by a bias, where these are in fewer than 8 bits (behind
    8-bit products a few rows of large values decide the mean: on Gemma 3 270M a bias there costs 1.8 % of perplexity).
    follow: rows of layers aim at the float model's outputs, not at the float weights. damp, table_damp: share of the
    mean diagonal added to a Hessian; the latter for a table that is both looked up and multiplied.
    """

    stratified: bool = True
    no_clipping: bool = True
    own_scales: bool = True
    output_bias: bool = True
    follow: bool = True
    damp: float = 0.05
    table_damp: float = 0.3


class Calibration:
    """What was seen, kept in `folder`; gives quantisers (`method`) and biases (`source`) for a quantisation."""

    def __init__(self, spec: ModelSpec, source: Source, conditions: Conditions, folder: Path, quant: QuantSpec):
        self.spec = replace(spec, output_bias=spec.output_bias or conditions.output_bias)
        self.own_bias = spec.output_bias
        self.conditions = conditions
        self.quant = quant
        self.tokens = 0
        self.ranges: dict[str, Range] = {}
        self._source, self._folder = source, folder
        self._means: dict[str, tuple[Tensor, Tensor]] = {}
        self._biases: dict[str, NDArray[np.float32]] = {}

    def method(self, quant: QuantSpec) -> Method:
        """Rounds with feedback what was seen, and to nearest what was not (the embedding, unless it is the head)."""
        table = {"head": "table", "embed": "table"} if self.spec.tied and quant.head == quant.embedding else {}

        def quantise(rows: NDArray[np.float32], how: TensorQuant, name: str) -> rtn.Quantized:
            seen = self._load(table.get(name, name))
            if seen is None:
                return rtn.quantize_rows(rows, how, name)
            return gptq.quantize_rows(rows, how, name, seen, clip=not self.conditions.no_clipping)

        return quantise

    def source(self, quant: QuantSpec) -> Source:
        """The checkpoint, with the biases that belong to `quant`."""
        return _Biased(self._source, self, quant)

    def bias(self, name: str, quant: QuantSpec) -> NDArray[np.float32]:
        """float32 [hidden] behind the product `name`: the checkpoint's own, and what the mean output lost."""
        own = self._source.read(f"{name}.bias") if self.own_bias else np.zeros(self.spec.hidden_size, np.float32)
        return own + self._correction(name, quant)

    def _correction(self, name: str, quant: QuantSpec) -> NDArray[np.float32]:
        how = quant.of("attention" if name.endswith(".o") else "ffn")
        if name not in self._means or how is None or how.bits >= 8:  # a mixture of experts, or not wanted
            return np.zeros(self.spec.hidden_size, np.float32)
        if quant == self.quant and name in self._biases:
            return self._biases[name]
        rounded = read_restored(self._source, name, 0, None, how, self.method(quant))
        return self._shift(name, torch.from_numpy(self._source.read(name)), rounded)

    def add(self, name: str, seen: Statistics) -> None:
        """Keeps what was seen in front of the product `name`."""
        if seen.range is not None:
            self.ranges[name] = seen.range
        if seen.hessian is not None:
            self._save(name, gptq.feedback(seen.hessian, self.conditions.damp, seen.cross))
            if name == "head" and self.spec.tied:
                self._save("table", gptq.feedback(seen.hessian, self.conditions.table_damp))
        if self.conditions.output_bias and name.endswith(BIASED) and ".experts." not in name:
            self._means[name] = seen.means

    def correct(self, name: str, rounded: Tensor) -> None:
        """Fixes the bias of the product `name`, whose weights became `rounded`."""
        if name in self._means:
            self._biases[name] = self._shift(name, torch.from_numpy(self._source.read(name)), rounded)

    def _shift(self, name: str, exact: Tensor, rounded: Tensor) -> NDArray[np.float32]:
        wanted, given = self._means[name]
        return (exact.double() @ wanted - rounded.double() @ given).float().numpy()

    def _save(self, name: str, how: Feedback) -> None:
        aim = {} if how.aim is None else {"aim": how.aim.numpy()}
        parts = {"order": how.order.numpy(), "spread": how.spread.numpy(), "weight": how.weight.numpy(), **aim}
        np.savez(self._folder / f"{name}.npz", **parts)

    def _load(self, name: str) -> Feedback | None:
        path = self._folder / f"{name}.npz"
        if not path.exists():
            return None
        with np.load(path) as parts:
            return Feedback(**{k: torch.from_numpy(parts[k]) for k in parts.files})

    def to_json(self) -> dict[str, Any]:
        """What a runtime with 8-bit activations needs, and how it was found."""
        scales = {name: asdict(r) for name, r in self.ranges.items()}
        if not self.conditions.own_scales:
            scales = {"model": {k: max(s[k] for s in scales.values()) for k in ("largest", "usual")}}
        return {"conditions": asdict(self.conditions), "tokens": self.tokens, "inputs": scales}


class _Biased:
    """Is a ReadySource because the checkpoint may be one."""

    def __init__(self, source: Source, calibration: Calibration, quant: QuantSpec):
        self._source, self._calibration, self._quant = source, calibration, quant

    def ready(self, name: str, quant: TensorQuant, start: int = 0, stop: int | None = None) -> rtn.Quantized | None:
        return self._source.ready(name, quant, start, stop) if isinstance(self._source, ReadySource) else None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        product = name.removesuffix(".bias")
        if product != name and product.endswith(BIASED):
            return self._calibration.bias(product, self._quant)
        return self._source.read(name, start, stop)
