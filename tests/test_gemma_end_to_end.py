"""Gemma 3 270M from file to text: ONNX Runtime against the reference on the same quantised weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mimo_edge import Engine
from mimo_edge.backends import registry
from mimo_edge.backends.base import Step
from mimo_edge.bundle import Bundle
from mimo_edge.export.pipeline import export_bundle
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.pools import KvPools
from mimo_edge.spec import QuantSpec, TensorQuant

HERE = Path(__file__).parent
TEXTS = HERE / "data" / "prose.txt", HERE.parent / "export" / "quantize" / "texts" / "docs.txt"
ROWS = 1200  # beyond two windows of 512
LONG = 2000
WIDE = TensorQuant(8, 128)


@pytest.fixture(scope="module")
def bundle(gemma_gguf, tmp_path_factory) -> Bundle:
    """4-bit head, the rest 8 bits: what the exporter chooses by measurement, without measuring again."""
    out = tmp_path_factory.mktemp("gemma") / "bundle"
    return export_bundle(gemma_gguf, out, quant=QuantSpec(WIDE, WIDE, WIDE, TensorQuant(4, 32)), max_context=2048)


def text(bundle: Bundle, rows: int) -> np.ndarray:
    """The first token ids of prose, followed by documentation."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(bundle.file("tokenizer.json"))).encode("".join(t.read_text() for t in TEXTS)).ids
    assert len(ids) >= rows
    return np.array(ids[:rows])


class Rows:
    """Logits of a text, in chunks, through a backend; a chunk's logits are 134 MB, so no more are held."""

    def __init__(self, bundle: Bundle, backend: str, chunk: int = 128):
        self._backend = registry.load(backend, bundle, 2)
        self._chunk, self._layout = chunk, plan_layout(bundle.spec, LONG)
        self._backend.allocate(self._layout)

    def __call__(self, tokens: np.ndarray):
        slots = KvPools(self._layout).admit(LONG)
        for start in range(0, len(tokens), self._chunk):
            part = tokens[start : start + self._chunk]
            (out,) = self._backend.run([Step(slots, start, part, np.arange(len(part)))])
            self._backend.commit([len(part)])
            yield start, out.logits
        self._backend.close()


def test_float_activations_equal_the_reference_past_two_windows(bundle):
    tokens, squares, error = text(bundle, ROWS), 0.0, 0.0
    pairs = zip(Rows(bundle, "onnxruntime-float")(tokens), Rows(bundle, "reference")(tokens), strict=True)
    for (_, got), (_, want) in pairs:
        error += float(np.square(got - want, dtype=np.float64).sum())
        squares += float(np.square(want, dtype=np.float64).sum())
    assert (error / squares) ** 0.5 < 1e-3


def test_200_greedy_tokens_are_the_reference_s(bundle):
    with Engine.open(bundle.path, "onnxruntime-float", threads=2) as engine:
        prompt = engine.text.encode("The old lighthouse stood")
        reply = engine.generate(prompt, max_tokens=200)
        list(reply)
    tokens = np.array([*prompt, *reply.result.tokens])
    # greedy decoding of the reference takes the same 200 tokens iff each is its best one behind those before it
    best = np.concatenate([logits.argmax(-1) for _, logits in Rows(bundle, "reference")(tokens[:-1])])
    assert best[len(prompt) - 1 :].tolist() == list(reply.result.tokens) and len(reply.result.tokens) == 200


def test_8_bit_activations_cost_less_than_one_percent_of_perplexity(bundle):
    tokens, nats = text(bundle, LONG), {}
    for backend in ("onnxruntime", "onnxruntime-float"):
        total = 0.0
        for start, logits in Rows(bundle, backend)(tokens):
            targets = torch.from_numpy(tokens[start + 1 : start + 1 + len(logits)])
            rows = torch.from_numpy(logits[: len(targets)])
            total += float(torch.nn.functional.cross_entropy(rows, targets, reduction="sum"))
        nats[backend] = total / (LONG - 1)
    assert np.exp(nats["onnxruntime"] - nats["onnxruntime-float"]) < 1.01
