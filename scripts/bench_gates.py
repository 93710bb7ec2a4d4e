"""Quality of Gemma 3 270M (or any dense checkpoint) against the share of feed-forward work that gates skip.

    python scripts/bench_gates.py gemma-3-270m-q4_k_m.gguf --calib text.jsonl [--plot docs/gates_gemma.png]

For blocks of 16, 32 and 64 channels: gates trained on the calibration text, and the oracle, which sees the computed
feed-forward and keeps the blocks whose loss would be felt most; the same order of channels for both. Float weights.
The two texts measured on are those of bench_quality.py; the calibration text must hold neither. Takes half an hour.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench_quality import encode
from tokenizers import Tokenizer
from torch import Tensor

from mimo_edge.export.families import Checkpoint, open_checkpoint
from mimo_edge.export.gates.add import SHARES
from mimo_edge.export.gates.budget import BLOCKS, gate_spec
from mimo_edge.export.gates.calibrate import ORDER_ROWS, head_of, prepare, train
from mimo_edge.export.gates.curve import CurvePoint, LayerUse, Meter, layer_uses, measure_point
from mimo_edge.export.gates.sensitivity import metrics
from mimo_edge.export.quantize.calibration_data import read_calibration
from mimo_edge.text import Text

USED_AT = 0.4  # share at which layers are looked at


@dataclass(frozen=True)
class Result:
    """One block size: both curves, and the layers at USED_AT."""

    block: int
    rank: int
    curve: tuple[CurvePoint, ...]
    layers: tuple[LayerUse, ...]


class Kept:
    """A checkpoint's source that keeps what it has read."""

    def __init__(self, source: Any):
        self._source, self._kept = source, {}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        if name not in self._kept:
            self._kept[name] = self._source.read(name)
        return self._kept[name][start:stop]


def calibration(checkpoint: Checkpoint, path: Path, tokens: int) -> tuple[Tensor, ...]:
    text = Text(Tokenizer.from_str(checkpoint.tokenizer_json), checkpoint.spec, checkpoint.chat_template)
    return read_calibration(path, text, checkpoint.spec.eos_ids[:1], tokens, stratified=True)


class Bench:
    """One checkpoint, one calibration, two texts; block sizes one after the other."""

    def __init__(self, checkpoint: Checkpoint, texts: Sequence[Tensor], measured: dict[str, Tensor]):
        self._spec, self._source = checkpoint.spec, Kept(checkpoint.source)
        self._texts, self._measured = texts, measured
        self._began = time.perf_counter()
        self._metrics = metrics(self._spec, self._source, head_of(texts, ORDER_ROWS), 0, self._say("metric"))
        self._meter = Meter(self._spec, self._source, measured)

    def run(self, block: int, shares: Sequence[float]) -> Result:
        """Prints a row a point: what the gate and the oracle skip, and what each loses on the texts."""
        spec, source = self._spec, self._source
        gate = gate_spec(spec, block)
        prepared = prepare(spec, source, self._texts, block, self._metrics, 0, self._say(f"{block}: order"))
        trained = train(spec, source, self._texts, prepared, gate, 0, self._say(f"{block}: gates"))
        points = []
        for share in shares:
            points.append(measure_point(self._meter, source, prepared, trained, share))
            cells = [
                f"{m.skipped:6.1%} | {' | '.join(f'{x:+7.1%}' for x in m.losses.values())}"
                for m in (points[-1].gate, points[-1].oracle)
            ]
            print(f"| {block} | {share:4.0%} | {' | '.join(cells)} |", flush=True)
        uses = layer_uses(spec, source, prepared, trained.at(USED_AT), USED_AT, self._measured)
        return Result(block, gate.rank, tuple(points), tuple(uses))

    def _say(self, what: str) -> Callable[[int, int], None]:
        def say(done: int, total: int) -> None:
            print(f"  {time.perf_counter() - self._began:5.0f} s  {what}: {done} of {total}", flush=True)

        return say


def plot(results: list[Result], path: Path) -> None:
    """One panel a text: solid lines are gates, dashed ones the oracle."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(results[0].curve[0].gate.losses)
    figure, axes = plt.subplots(1, len(names), figsize=(10, 4), sharey=True)
    for axis, name in zip(axes, names, strict=True):
        for colour, result in enumerate(results):
            for kind, style in (("gate", "-o"), ("oracle", "--")):
                points = [getattr(p, kind) for p in result.curve]
                skipped = [0.0] + [100 * m.skipped for m in points]
                losses = [0.0] + [100 * m.losses[name] for m in points]
                axis.plot(skipped, losses, style, color=f"C{colour}", ms=3, label=f"{kind}, blocks of {result.block}")
        axis.set(title=name, xlabel="feed-forward work skipped, %", yscale="symlog", ylim=(-1, None))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("perplexity lost, %")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--calib", type=Path, required=True, help="JSON lines of text")
    parser.add_argument("--calib-tokens", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=1800, help="of each text measured on")
    parser.add_argument("--blocks", type=int, nargs="+", default=list(BLOCKS))
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--plot", type=Path, help="PNG to draw")
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.source)
    texts = calibration(checkpoint, args.calib, args.calib_tokens)
    measured = {name: t[: args.tokens] for name, t in encode(checkpoint).items()}
    with torch.no_grad():
        bench = Bench(checkpoint, texts, measured)
        results = [bench.run(block, args.shares) for block in args.blocks]
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
    if args.plot:
        plot(results, args.plot)
    sizes = ", ".join(f"{name} {len(t)} tokens" for name, t in measured.items())
    print(f"calibration {sum(map(len, texts))} tokens; {sizes}; Python {platform.python_version()}")


if __name__ == "__main__":
    main()
