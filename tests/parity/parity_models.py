"""The models that backends are compared on, and what the oracle says about them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from _mtp import without_gates
from _parity import random_weights, shapes
from numpy.typing import NDArray

from mimo_edge.backends import oracle
from mimo_edge.backends.reference import BundleWeights
from mimo_edge.bundle import BUILT_IN, TOKENIZER, WEIGHTS, Bundle
from mimo_edge.evaluation.suites import load_suite
from mimo_edge.export.programs import retarget
from mimo_edge.tensors import read_tensors
from mimo_edge.text import Text

GIVEN = "MIMO_EDGE_PARITY_BUNDLE"  # the folder of one more bundle
MODELS = ("built-in", "built-in, gates off", "mimo-v2, random", "gemma, random", "given bundle")


class Model:
    """A bundle, sizes of what is done with it, and the oracle's answers, which are kept.

    `chunk` is the most rows of a step, `reply` how many tokens follow a prompt, `cached` how many a cached one has.
    """

    def __init__(
        self,
        bundle: Bundle,
        chunk: int = 512,
        reply: int = 24,
        cached: int | None = None,
        prompts: Sequence[NDArray[np.int64]] = (),
    ):
        self.bundle, self.spec, self.chunk, self.reply = bundle, bundle.spec, chunk, reply
        windows = [a.window for a in self.spec.attention.values() if a.window is not None]
        self.window = max(windows, default=8)
        self.whole = min(220, chunk)
        self.odd = (1, 37, 4, 150, 16, 3, 9) if chunk > 150 else (1, 7, 4, chunk - 1)
        self.cached = cached or max(self.window, 64) + 7  # a page and a part of one
        self.context = min(self.spec.max_context, 64 * -(-max(self.window + 64, self.whole + 20, 128) // 64))
        self.prompts = [p[-self.whole :] for p in prompts] or [self.random(self.window + 2, 9)]
        self._weights = BundleWeights(self.spec, read_tensors(bundle.file(WEIGHTS)), keep=True)
        self._known: dict[tuple, NDArray[np.float32]] = {}

    def random(self, count: int, seed: int) -> NDArray[np.int64]:
        return np.random.default_rng(seed).integers(3, self.spec.vocab_size, count)

    def logits(
        self, text: NDArray[np.int64], rows: NDArray[np.int64], head: int | None = None, held: int = 0
    ) -> NDArray[np.float32]:
        """Logits [len(rows), vocab] behind rows of a text, all of it evaluated at once; see parity_scenarios.Part."""
        key = (text.tobytes(), rows.tobytes(), head, held)
        if key not in self._known:
            with torch.inference_mode():
                self._known[key] = self._main(text, rows) if head is None else self._head(text, rows, head, held)
        return self._known[key]

    def _main(self, text: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        known, past = torch.from_numpy(text), [None] * len(self.spec.layers)
        wanted = torch.from_numpy(rows)
        return oracle.forward(self.spec, self._weights, known, torch.arange(len(text)), past, wanted).logits.numpy()

    def _head(self, text: NDArray[np.int64], rows: NDArray[np.int64], head: int, held: int) -> NDArray[np.float32]:
        n = int(rows[-1]) + 1
        known, places, past = torch.from_numpy(text), torch.arange(n), [None] * len(self.spec.layers)
        hidden = oracle.forward(self.spec, self._weights, known[:n], places, past, places[:0]).hidden
        ahead = known[held + 1 + head : n + 1 + head]
        return oracle.mtp(self.spec, self._weights, head, hidden[held:], ahead, places[held:], None)[0][-1:].numpy()


def make(name: str, folder: Path, capabilities: Sequence[int]) -> Model:
    """Model `name` in a new folder, with kernels for these GPUs. Raises LookupError, saying why it is not there."""
    if name.startswith("built-in"):
        source = Bundle.open(BUILT_IN)
        text = Text.open(source.file(TOKENIZER), source.spec, source.chat_template)
        commands = load_suite("commands", 2).commands
        prompts = [np.array(text.encode_chat(list(c.messages))) for c in commands]
        if name.endswith("gates off"):
            source = Bundle.open(without_gates(source.path, folder / "without gates"))
        return Model(retarget(source, folder / "bundle", capabilities, quiet), prompts=prompts)
    if name == "given bundle":
        if not (given := os.environ.get(GIVEN)):
            raise LookupError(f"{GIVEN} names no bundle")
        return Model(retarget(Bundle.open(given), folder / "bundle", capabilities, quiet))
    shape = name.partition(",")[0]
    return Model(random_weights(shapes()[shape], folder / "bundle", capabilities, len(shape), quiet))


def quiet(done: int, total: int, what: str) -> None:
    """A progress callback that says nothing."""
