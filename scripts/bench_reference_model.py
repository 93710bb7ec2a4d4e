"""Exact match of a bundle's actions on held-out commands, by greedy decoding through the engine.

    python -m scripts.reference_model.prepare TEXT TOKENIZER.json DATA      # writes DATA/commands.jsonl
    python scripts/bench_reference_model.py DATA/commands.jsonl [--bundle DIR] [--every 5]

Prints the share with a 95 % bootstrap interval, by language and for the weakest intents; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from rich.progress import track

from mimo_edge import Engine
from mimo_edge.bundle import BUILT_IN


def action(engine: Engine, command: dict) -> str:
    """The reply's first line."""
    prompt = engine.text.encode_chat(command["messages"])
    return "".join(engine.generate(prompt, max_tokens=80, stop="\n"))


def interval(right: list[bool], rng: np.random.Generator) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    means = rng.choice(np.array(right, float), (2000, len(right))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", type=Path)
    parser.add_argument("--bundle", type=Path, default=BUILT_IN)
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--every", type=int, default=1, help="take one command in so many")
    args = parser.parse_args()
    commands = [json.loads(line) for line in args.commands.read_text("utf-8").splitlines()][:: args.every]
    groups: dict[str, list[bool]] = defaultdict(list)
    began = time.perf_counter()
    with Engine.open(args.bundle, args.backend) as engine:
        for command in track(commands, "commands"):
            right = action(engine, command) == command["action"]
            for group in ("all", f"language {command['language']}", f"intent {command['intent']}"):
                groups[group].append(right)
    rng = np.random.default_rng(0)
    rates = {name: (float(np.mean(r)), len(r), *interval(r, rng)) for name, r in groups.items()}
    weakest = sorted((n for n in rates if n.startswith("intent")), key=lambda n: rates[n][0])[:8]
    for name in ["all", *sorted(n for n in rates if n.startswith("language")), *weakest]:
        rate, count, low, high = rates[name]
        print(f"{name:24} {rate:7.2%} of {count:5}   95 % interval {low:.2%} to {high:.2%}")
    print(f"{len(commands) / (time.perf_counter() - began):.1f} commands a second")
    print(json.dumps({"backend": args.backend, "rates": rates}))


if __name__ == "__main__":
    main()
