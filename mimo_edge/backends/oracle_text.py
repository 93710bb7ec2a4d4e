"""What a bundle's heads draft and its gates keep along a finished text: the oracle, over all of it at once.

No graph holds the heads yet, so this is where acceptance is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mimo_edge.backends import oracle
from mimo_edge.backends.reference import BundleWeights
from mimo_edge.bundle import WEIGHTS, Bundle, read_tensors
from mimo_edge.spec import ModelSpec


@dataclass(frozen=True)
class Reading:
    """logits: of every head, float32 [T - 1 - i, vocab] of head i, whose row p is for token p + 2 + i.
    kept: share of blocks that a gate keeps, float32 [gated layers, T]."""

    logits: tuple[NDArray[np.float32], ...]
    kept: NDArray[np.float32]


class TextReader:
    """Holds a bundle's weights dequantised: 4 bytes a weight."""

    def __init__(self, spec: ModelSpec, weights: oracle.Weights):
        self.spec, self._weights = spec, weights

    @staticmethod
    def open(bundle: Bundle) -> TextReader:
        tensors = read_tensors(bundle.file(WEIGHTS))
        return TextReader(bundle.spec, BundleWeights(bundle.spec, tensors, keep=True))

    @torch.inference_mode()
    def read(self, tokens: list[int], first: int) -> Reading:
        """Heads' logits start at row `first`; row p is what is drafted from while token p + 1 is pending."""
        spec, weights, ids = self.spec, self._weights, torch.tensor(tokens)
        positions = torch.arange(len(tokens))
        x, kept = weights.rows("embed", ids) * spec.embed_scale, []
        for i, kinds in enumerate(spec.layers):
            prefix = f"layers.{i}"
            x, _, _ = oracle.add_attention(spec, weights, prefix, kinds.attention, x, positions, None)
            if spec.ffn[kinds.ffn].gate:
                kept.append(self._kept(prefix, kinds.ffn, x))
            x = oracle.add_feed_forward(spec, weights, prefix, kinds.ffn, x)
        logits = tuple(self._drafts(m, x, ids, first) for m in range(spec.mtp.heads if spec.mtp else 0))
        return Reading(logits, torch.stack(kept).numpy() if kept else np.empty((0, len(tokens)), np.float32))

    def _kept(self, prefix: str, kind: str, x: Tensor) -> Tensor:
        def get(name: str) -> Tensor:
            return self._weights.get(f"{prefix}.{name}")

        gate = self.spec.ffn[kind].gate
        assert gate is not None
        return oracle.block_mask(gate, get, oracle.rms_norm(x, get("ffn_norm"), self.spec.norm_eps)).mean(-1)

    def _drafts(self, m: int, hidden: Tensor, tokens: Tensor, first: int) -> NDArray[np.float32]:
        """Logits of one head from row `first` on; rows before it only give it keys and values."""
        ahead = tokens[1 + m :]
        if len(ahead) <= first:
            return np.empty((0, self.spec.vocab_size), np.float32)
        logits, *_ = oracle.mtp(
            self.spec, self._weights, m, hidden[: len(ahead)], ahead, torch.arange(len(ahead)), None
        )
        return logits[first:].numpy()
