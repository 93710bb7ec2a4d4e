"""Writes golden tokens (mimo_edge/golden.py) with the oracle, a layer's weights in memory at a time."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from mimo_edge.backends import oracle
from mimo_edge.backends.reference import BundleWeights
from mimo_edge.bundle import TOKENIZER, WEIGHTS, Bundle, BundleWriter, read_tensors
from mimo_edge.golden import SELFTEST, Case, Golden
from mimo_edge.spec import ModelSpec
from mimo_edge.text import Text

TEXTS = (
    "The old lighthouse stood at the end of the pier, and every evening the keeper climbed its stairs to",
    "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n    return",
    "Zürich, 12 °C; 3.14159 ≈ π; 你好 世界! 1, 2, 3, 4, 5, 6,",
)
MESSAGES = ("pick up the red cup", "turn on the kitchen light, please")
MOST = 96  # tokens of a case
_BLOCK_BYTES = 64 << 20  # rows of the head in float32


def write_golden(folder: Path, spec: ModelSpec, chat_template: str | None) -> None:
    """Puts selftest.json into the folder of a bundle that is being written; its weights and tokenizer are there."""
    text = Text.open(folder / TOKENIZER, spec, chat_template)
    weights = BundleWeights(spec, read_tensors(folder / WEIGHTS))
    (folder / SELFTEST).write_text(golden(spec, weights, text, chat_template is not None).dumps(), encoding="utf-8")


def golden(spec: ModelSpec, weights: BundleWeights, text: Text, chat: bool) -> Golden:
    """Cases for texts, and for messages where there is a chat template. Texts are cut to the model's context."""
    prompts = [(t, False, text.encode(t)) for t in TEXTS]
    if chat:
        prompts += [(m, True, text.encode_chat([{"role": "user", "content": m}])) for m in MESSAGES]
    prompts = [p for p in prompts if 1 <= len(p[2]) <= min(MOST, spec.max_context)]
    with torch.inference_mode():
        states = _hidden(spec, weights, [torch.tensor(ids) for _, _, ids in prompts])
        best, margin = _best_two(spec, weights, torch.cat(states)) if states else (torch.zeros(0), torch.zeros(0))
    cases, at = [], 0
    for words, is_chat, ids in prompts:
        rows = slice(at, at + len(ids))
        margins = tuple(round(float(m), 4) for m in margin[rows])
        cases.append(Case(words, is_chat, tuple(ids), tuple(int(b) for b in best[rows]), margins))
        at += len(ids)
    return Golden(tuple(cases))


def add_golden(bundle: Bundle, out: Path) -> Bundle:
    """A copy of a bundle that has selftest.json, or a new one. Raises as BundleWriter does."""
    names = [name for name in bundle.manifest.files if name != SELFTEST]
    with BundleWriter(out) as writer:
        writer.reserve(sum(bundle.manifest.files[n].bytes for n in names))
        for name in names:
            writer.path(name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.file(name), writer.path(name))
        write_golden(writer.path("."), bundle.spec, bundle.chat_template)
        return writer.finish(bundle.spec, bundle.manifest.target, bundle.manifest.name)


def _hidden(spec: ModelSpec, weights: oracle.Weights, texts: list[Tensor]) -> list[Tensor]:
    """Normed hidden rows of each text."""
    states = [weights.rows("embed", t) * spec.embed_scale for t in texts]
    for i, kinds in enumerate(spec.layers):
        for t, x in enumerate(states):
            where = torch.arange(len(x))
            states[t], _, _ = oracle.block(spec, weights, f"layers.{i}", kinds.attention, kinds.ffn, x, where, None)
    return [oracle.rms_norm(x, weights.get("norm"), spec.norm_eps) for x in states]


def _best_two(spec: ModelSpec, weights: BundleWeights, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """(token, margin to the next) of every row; the head in blocks of rows."""
    name = "head" if spec.separate_head else "embed"
    step = max(1, _BLOCK_BYTES // 4 // max(spec.hidden_size, len(hidden)))
    values, ids = torch.empty(len(hidden), 0), torch.empty(len(hidden), 0, dtype=torch.int64)
    for start in range(0, spec.vocab_size, step):
        rows = torch.arange(start, min(start + step, spec.vocab_size))
        found = (hidden @ weights.rows(name, rows).T).topk(min(2, len(rows)), dim=1)
        values, ids = torch.cat([values, found.values], 1), torch.cat([ids, found.indices + start], 1)
    order = values.sort(dim=1, descending=True, stable=True)
    best = ids.gather(1, order.indices[:, :1])[:, 0]
    return best, order.values[:, 0] - (order.values[:, 1] if spec.vocab_size > 1 else 0)
