"""Whether two replies part because a gate kept a block in one and skipped it in the other, by rounding alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mimo_edge.backends import oracle
from mimo_edge.backends.reference import BundleWeights
from mimo_edge.bundle import WEIGHTS, Bundle
from mimo_edge.evaluation.ties import margin
from mimo_edge.request import SamplingParams
from mimo_edge.spec import GateSpec
from mimo_edge.tensors import read_tensors

Place = tuple[int, int, int]  # layer with a gate, row, block


class GateTies:
    """Evaluates texts in float32, with single blocks turned around."""

    def __init__(self, bundle: Path):
        found = Bundle.open(bundle)
        self._spec = found.spec
        self._weights = BundleWeights(found.spec, read_tensors(found.file(WEIGHTS)), keep=True)

    def explain(self, text: Sequence[int], pair: tuple[int, int], params: SamplingParams, epsilon: float) -> bool:
        """Whether a block of the text's rows has a score (threshold 0) within epsilon of the threshold, and that block
        alone brings the first token to within epsilon of the second."""
        _, near = self.evaluate(text, epsilon)
        for place in near:
            logits, _ = self.evaluate(text, epsilon, place)
            if margin(logits, pair, len(text), params, text) < epsilon:
                return True
        return False

    def evaluate(
        self, text: Sequence[int], epsilon: float, turned: Place | None = None
    ) -> tuple[NDArray[np.float32], list[Place]]:
        """Logits [vocab] behind the text, and where a gate's score is within epsilon of 0. Block `turned` is kept where
        its gate skips it, and the other way round."""
        near, layer = list[Place](), -1

        def block_mask(_g: GateSpec, get, x: torch.Tensor) -> torch.Tensor:
            nonlocal layer
            layer += 1
            scores = F.relu(x @ get("gate.w1").T) @ get("gate.w2").T + get("gate.bias")
            near.extend((layer, row, block) for row, block in (scores.abs() < epsilon).nonzero().tolist())
            mask = (scores > 0).to(x.dtype)
            if turned and turned[0] == layer:
                mask[turned[1:]] = 1 - mask[turned[1:]]
            return mask

        tokens = torch.tensor(text)
        last = torch.tensor([len(text) - 1])
        past = [None] * len(self._spec.layers)
        with torch.inference_mode(), mock.patch.object(oracle, "block_mask", block_mask):
            out = oracle.forward(self._spec, self._weights, tokens, torch.arange(len(text)), past, last)
        return out.logits[0].numpy(), near
