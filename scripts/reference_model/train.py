"""Trains the reference model, in pieces that resume.

    python -m scripts.reference_model.train --data DATA --run RUN --out OUT --steps 7000 --minutes 8

DATA is prepare.py's output folder. RUN keeps the state between pieces; a piece ends at the last step or after
--minutes. OUT receives the checkpoint, curves (steps.csv, evaluations.csv) and, at the end, results.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from scripts.reference_model import checkpoint
from scripts.reference_model.chat import BOS, SPECIAL, TEMPLATE
from scripts.reference_model.evaluate import commands, general_summary, predict, summary
from scripts.reference_model.feed import feed
from scripts.reference_model.gates import GatePlan
from scripts.reference_model.packing import general_rows, sample_rows, tokenize_general
from scripts.reference_model.prepare import load_encoded, load_tokens
from scripts.reference_model.shape import reference_spec, tiny_spec
from scripts.reference_model.trainer import Plan, Trainer


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "run", "out"):
        p.add_argument(f"--{name}", type=Path, required=True)
    p.add_argument("--steps", type=int, required=True, help="length of the whole run")
    p.add_argument("--minutes", type=float, default=9.0, help="the most this piece may take, final evaluation included")
    p.add_argument("--until", type=int, default=None, help="stop this piece at a step")
    p.add_argument("--batch", type=int, default=Plan.batch)
    p.add_argument("--length", type=int, default=Plan.length)
    p.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 2))
    p.add_argument("--eval-every", type=int, default=250)
    p.add_argument(
        "--polish", type=Path, help="start from this checkpoint, gates at work from the first step, lower rates"
    )
    p.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to try everything out")
    return p.parse_args()


def polishing(steps: int, batch: int, length: int) -> Plan:
    """A short run on a trained model: other rows, rates that fall from the start."""
    gates = GatePlan(start=-1.0, end=0.0)
    return Plan(steps, batch, length, seed=2, matrix_lr=0.012, other_lr=0.0018, warmup=60, cooldown=0.0, gates=gates)


class Curves:
    """Appends rows to CSV files in RUN; columns are fixed by the first row."""

    def __init__(self, folder: Path):
        self._folder = folder

    def add(self, name: str, row: dict[str, float]) -> None:
        path = self._folder / f"{name}.csv"
        new = not path.exists()
        with path.open("a", newline="") as f:
            writer = csv.DictWriter(f, list(row))
            if new:
                writer.writeheader()
            writer.writerow({k: round(v, 5) for k, v in row.items()})


class Evaluator:
    """The small evaluation during training and the full one at the end."""

    def __init__(self, trainer: Trainer, data: Path):
        self._trainer, plan = trainer, trainer.plan
        self._encoded, self._groups = load_encoded(data / "commands.npz")
        heldout = load_tokens(data / "heldout.u16.xz")
        self._general = general_rows(heldout, SPECIAL.index(BOS), 4 * plan.batch, plan.length)
        self._few = sample_rows(self._encoded[:: max(1, len(self._encoded) // 150)], plan.length)

    def small(self) -> dict[str, float]:
        out = {}
        for name, dense in (("gated", False), ("dense", True)):
            p = predict(self._trainer, self._few, dense)
            found = summary(commands(self._few, p))
            general = predict(self._trainer, self._general, dense)
            out |= {f"{name}_{k}": found[k] for k in ("action", "reply", "length")}
            out |= {
                f"{name}_{k}": v
                for k, v in general_summary(self._general, general).items()
                if k in ("perplexity", "agree0")
            }
            if not dense:
                out |= {"kept_commands": p.kept[0], "kept_general": general.kept[1], "flips": p.kept[2]}
        return out

    def full(self) -> dict:
        """Every held-out command and text, with gates and dense; per intent, with counts."""
        rows = sample_rows(self._encoded, self._trainer.plan.length)
        out: dict = {}
        for name, dense in (("gated", False), ("dense", True)):
            p, g = predict(self._trainer, rows, dense), predict(self._trainer, self._general, dense)
            found = commands(rows, p)
            by: dict[str, list] = {}
            for group, labels in self._groups.items():
                for label, c in zip(labels, found, strict=True):
                    by.setdefault(f"{group}:{label}", []).append(c)
            out[name] = {
                "all": summary(found),
                "general": general_summary(self._general, g),
                "kept": p.kept,
                "kept_general": g.kept,
            }
            out[name]["groups"] = {k: [len(v), float(np.mean([c.action for c in v]))] for k, v in by.items()}
        return out


def general_file(data: Path, run: Path, tokenizer: Tokenizer) -> Path:
    """The general text as tokens, made by the first piece."""
    path = run / "general.npy"
    if not path.exists():
        begun = time.monotonic()
        tokens = tokenize_general(data / "general.txt.xz", tokenizer)
        np.save(path, tokens)
        print(
            f"general text: {len(tokens) / 1e6:.2f}M tokens, tokenised in {time.monotonic() - begun:.0f} s", flush=True
        )
    return path


def write_outputs(trainer: Trainer, args: argparse.Namespace) -> None:
    tokenizer = (args.data / "tokenizer.json").read_text("utf-8")
    checkpoint.write(args.out, trainer.spec, trainer.model.state_dict(), tokenizer, TEMPLATE.read_text("utf-8"))
    for path in args.run.glob("*.csv"):
        (args.out / path.name).write_bytes(path.read_bytes())


def main() -> None:
    args, begun = arguments(), time.monotonic()
    for folder in (args.run, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    general = general_file(args.data, args.run, tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    plan = (polishing if args.polish else Plan)(steps=args.steps, batch=args.batch, length=args.length)
    trainer = Trainer(tiny_spec(tokenizer.get_vocab_size()) if args.tiny else reference_spec(), plan, device)
    state = args.run / "state.pt"
    if state.exists():
        trainer.load(state)
    elif args.polish:
        trainer.model.load_state_dict(checkpoint.read(args.polish))
    size = sum(p.numel() for p in trainer.model.parameters())
    print(f"step {trainer.step_number} of {plan.steps} on {device}, {size} parameters")
    run_piece(trainer, args, general, begun)


def run_piece(trainer: Trainer, args: argparse.Namespace, general: Path, begun: float) -> None:
    plan, curves = trainer.plan, Curves(args.run)
    stop = min(plan.steps, args.until or plan.steps)
    evaluator = Evaluator(trainer, args.data)
    settings = {
        "first": trainer.step_number,
        "stop": stop,
        "batch": plan.batch,
        "length": plan.length,
        "seed": plan.seed,
    }
    last, tokens = time.monotonic(), 0
    for rows in feed(args.data / "tokenizer.json", general, **settings, workers=args.workers):
        row = trainer.step(rows)
        tokens += plan.batch * plan.length
        n = trainer.step_number
        if n % 50 == 0 or n == stop:
            values = {k: v.item() for k, v in row.items()}
            now = time.monotonic()
            curves.add("steps", {"step": n, **values, "rate": plan.rate(n - 1), "tokens_per_s": tokens / (now - last)})
            if n % 250 == 0 or n < 250:
                print(
                    n,
                    f"{now - begun:.0f}s {tokens / (now - last):.0f} tok/s",
                    {k: round(v, 4) for k, v in values.items()},
                    flush=True,
                )
            last, tokens = now, 0
        if n % args.eval_every == 0:
            found = evaluator.small()
            curves.add("evaluations", {"step": n, **found})
            print("   ", {k: round(v, 4) for k, v in found.items()}, flush=True)
            last = time.monotonic()
        if time.monotonic() - begun > args.minutes * 60:
            break
    trainer.save(args.run / "state.pt")
    finish(trainer, evaluator, args)
    print(f"piece ended at step {trainer.step_number} after {time.monotonic() - begun:.0f} s")


def finish(trainer: Trainer, evaluator: Evaluator, args: argparse.Namespace) -> None:
    """Writes what the piece has; after the last step, the full evaluation of the rounded weights too."""
    write_outputs(trainer, args)
    if trainer.step_number < trainer.plan.steps:
        return
    trainer.round_weights()
    results = evaluator.full()
    (args.out / "results.json").write_text(json.dumps(results, indent=1))
    for name in ("gated", "dense"):
        print(name, {k: v for k, v in results[name].items() if k != "groups"})
        weakest = sorted((share, k, n) for k, (n, share) in results[name]["groups"].items())[:14]
        print("   ", [(k, n, round(share, 3)) for share, k, n in weakest])


if __name__ == "__main__":
    main()
