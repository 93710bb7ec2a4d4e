"""MTP on a GPU: are tokens those of plain decoding, and what do rounds of draft, verify and accept gain?

    python scripts/bench_mtp_cuda.py [--bundle DIR] [--tasks 28] [--tokens 256] [--budget SECONDS]
    python scripts/bench_mtp_cuda.py --interpreter     without a GPU: every path at toy sizes; times mean nothing

The heads' logits against the oracle. On held-out commands with long replies, greedy and at temperature 1: tokens with 0
and 3 drafts, equal up to near ties; accepted drafts by position, just after the prompt and later; tokens/s over the
first 128 tokens and those behind; the device's time for draft, verify and accept; {plain, gates, drafts, both}; the
engine with adaptive drafts, on these tasks and on random text. Refuses to report speeds when anything is wrong. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _rounds import K, Run, Sequence, difference, head_errors

from mimo_edge.backends.base import Round
from mimo_edge.backends.cuda import CudaBackend
from mimo_edge.bundle import BUILT_IN, TOKENIZER, WEIGHTS, Bundle, BundleWriter, read_tensors
from mimo_edge.engine import Engine
from mimo_edge.evaluation.suites import load_suite
from mimo_edge.request import GREEDY, SamplingParams
from mimo_edge.spec import ModelSpec
from mimo_edge.text import Text

TOLERANCE = 2e-2  # of logits, relative
TIE = 0.05  # logits (or perturbed scores at temperature 1): what float16 activations may turn around
SHORT_REPLY = 48  # tokens
HALF, EARLY = 128, 16  # tokens: where the two speeds meet; what counts as just after the prompt
WAYS = {"greedy": GREEDY, "temperature 1": SamplingParams(temperature=1.0, seed=7)}


def speeds(runs: list[Run], half: int) -> dict[str, float]:
    """Tokens a second over the first `half` tokens of all replies, and over those behind."""
    first = sum(r.seconds[half - 1] for r in runs)
    rest = sum(r.seconds[-1] - r.seconds[half - 1] for r in runs)
    behind = sum(len(r.tokens) - half for r in runs)
    return {"first": half * len(runs) / first, "behind": behind / max(rest, 1e-9)}


def acceptance(runs: list[Run]) -> dict[str, Any]:
    """Accepted drafts by position, tokens a round, and the share accepted just after the prompt and later."""
    rounds = [r for run in runs for r in run.rounds if r[1]]
    by_position = [statistics.mean(a > i for _, m, a in rounds if m > i) for i in range(K)]
    early, later = ([r for r in rounds if (r[0] < EARLY) == first] for first in (True, False))
    share = [sum(a for *_, a in part) / max(1, sum(m for _, m, _ in part)) for part in (early, later)]
    length = 1 + statistics.mean(a for *_, a in rounds)
    return {"by_position": by_position, "tokens_a_round": length, "early": share[0], "later": share[1]}


def parts(sequence: Sequence, known: list[int], repeats: int) -> dict[str, float]:
    """Milliseconds on the device of a greedy round of K drafts, of what it consists of, and of a single row."""
    backend, steps, driver = sequence.backend, sequence.backend._ready(), sequence.backend.driver
    n = len(known) - 1
    backend.round(Round(sequence.slots, n, np.array(known[max(0, n - K) :], np.int64), K, 0, GREEDY))
    drafting = ["begin.drafts", *(x for m in range(K) for x in (f"draft.{m}", f"best.{m}"))]
    steps.capture("bench.draft", *drafting)
    steps.capture("bench.verify", "verify")
    steps.capture("bench.accept", "accept.best")
    out = {}
    for name in ("round.3.best", "bench.draft", "bench.verify", "bench.accept", "step.1", "step.4"):
        times: list[float] = []
        for _ in range(repeats):
            with driver.timed(times):
                steps.replay(name)
        out[name.removeprefix("bench.")] = statistics.median(times)
    return out


def through_engine(
    bundle: Bundle,
    backend: CudaBackend,
    prompts: list[list[int]],
    count: int,
    context: int,
    sampling: SamplingParams = GREEDY,
) -> Any:
    """Tokens/s of the engine without drafts, with 3 and adaptive, how many replies are equal, and why it chose so."""
    text = Text.open(bundle.file(TOKENIZER), bundle.spec, bundle.chat_template)
    engine = Engine(replace(bundle.spec, eos_ids=()), text, backend, max_context=context)  # main closes the backend
    results, tokens = {}, {}
    for drafts in (0, K, "auto"):
        replies = []
        for prompt in prompts:
            generation = engine.generate(prompt, max_tokens=count, drafts=drafts, sampling=sampling)  # type: ignore[arg-type]
            for _ in generation:
                pass
            replies.append(generation.result)
        tokens[drafts] = [r.tokens for r in replies]
        seconds = sum((len(r.tokens) - 1) / r.timings.decode_tok_s for r in replies if r.timings.decode_tok_s)
        results[str(drafts)] = {
            "tok_s": sum(len(r.tokens) - 1 for r in replies) / seconds,
            "equal": sum(a == b for a, b in zip(tokens[drafts], tokens[0], strict=True)) / len(replies),
            "why": replies[-1].mtp.reason,
        }
    return results


def without_gates(bundle: Bundle, out: Path, capability: int) -> Bundle:
    """The same model with every block on, for the cuda backend alone."""
    from mimo_edge.export.programs import write_device_weights
    from mimo_edge.export.programs.bundle import compile_kernels
    from mimo_edge.kernels import index

    spec = replace(bundle.spec, ffn={k: replace(f, gate=None) for k, f in bundle.spec.ffn.items()})
    with BundleWriter(out) as writer:
        compile_kernels(writer, spec, [capability], lambda *_: None)
        tensors = read_tensors(bundle.file(WEIGHTS))
        write_device_weights(spec, tensors, writer.path(index.WEIGHTS), writer.path(index.WEIGHTS_INDEX))
        for name in (WEIGHTS, TOKENIZER):
            writer.path(name).write_text("{}")
        return writer.finish(spec, f"sm_{capability}", "without gates")


def long_tasks(bundle: Bundle, tasks: int, least: int) -> list[list[int]]:
    """Prompts of held-out commands whose wanted replies have at least so many tokens, the longest first."""
    text = Text.open(bundle.file(TOKENIZER), bundle.spec, bundle.chat_template)
    commands = load_suite("commands").commands
    sizes = [len(text.encode(f"{c.action or ''}\n{c.reply or ''}")) for c in commands]
    order = [i for i in np.argsort(sizes)[::-1] if sizes[i] >= least][:tasks]
    return [list(text.encode_chat(commands[i].messages)) for i in order]


def on_gpu(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Bundle, CudaBackend]]:
    """The model with its gates, then without."""
    from mimo_edge.backends.cuda_driver import Driver
    from mimo_edge.export.programs import retarget

    driver = Driver()
    capability = driver.capability
    driver.close()
    bundle = retarget(Bundle.open(args.bundle), folder / "gates", [capability], lambda *_: None)
    yield "gates", bundle, CudaBackend.open(bundle)
    if any(f.gate for f in bundle.spec.ffn.values()):
        other = without_gates(bundle, folder / "plain", capability)
        yield "plain", other, CudaBackend.open(other)


def interpreted(folder: Path) -> Iterator[tuple[str, Bundle, CudaBackend]]:
    """Toys over the tests' stand-in for the driver."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from cuda_bundle import open_cuda, write_cuda_bundle
    from specs import mimo_spec

    for name, gate in (("gates", True), ("plain", False)):
        spec: ModelSpec = mimo_spec(5, gate=gate, mtp=3)
        bundle = write_cuda_bundle(folder / name, replace(spec, layers=spec.layers[:1]))
        yield name, bundle, open_cuda(bundle)


def check_many(sequence: Sequence, prompts: list[list[int]], count: int) -> dict[str, Any]:
    """Short replies to many prompts, without drafts and with K; stops by sys.exit as `measure` does."""
    out = {}
    for way, sampling in WAYS.items():
        parted = []
        for p in prompts:
            a, b = (sequence.decode(p, count, sampling, k).tokens for k in (0, K))
            parted.append(difference(sequence, p, a, b, sampling))
        near = [d for d in parted if d]
        if any(d["lead"] > TIE for d in near):
            sys.exit(f"refused: {way}: tokens with and without drafts differ: {near}")
        out[way] = {"prompts": len(parted), "equal": len(parted) - len(near), "near_ties": near}
    return out


def measure(
    name: str, bundle: Bundle, backend: CudaBackend, prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    """Everything of one model; stops by sys.exit when tokens differ by more than a near tie."""
    context, half = max(map(len, prompts)) + args.tokens + 8, min(HALF, args.tokens // 2)
    sequence, out = Sequence(backend, context), dict[str, Any]()
    sequence.decode(prompts[0], min(32, args.tokens), GREEDY, K)  # warm
    ends = set(bundle.spec.eos_ids)  # behind them text is of no kind that anybody reads, and repeats itself
    prompts = [
        p for p in prompts if not ends.intersection(sequence.decode(p, args.tokens, GREEDY, 0).tokens)
    ] or prompts
    out["tasks"] = len(prompts)
    if name == "gates":
        out["head_errors"] = head_errors(bundle, sequence, prompts[0])
        if not all(e < TOLERANCE for e in out["head_errors"]):
            sys.exit(f"refused: heads compute wrong logits (relative errors {out['head_errors']})")
    for way, sampling in WAYS.items():
        runs = {k: [sequence.decode(p, args.tokens, sampling, k) for p in prompts] for k in (0, *range(1, K + 1))}
        parted = [
            difference(sequence, p, a.tokens, b.tokens, sampling)
            for k in range(1, K + 1)
            for p, a, b in zip(prompts, runs[0], runs[k], strict=True)
        ]
        wrong = [d for d in parted if d and d["lead"] > TIE]
        if wrong:
            sys.exit(f"refused: {name}, {way}: tokens with and without drafts differ: {wrong}")
        equal = sum(d is None for d in parted)
        out[way] = {"replies": len(parted), "equal": equal, "near_ties": [d for d in parted if d]}
        out[way] |= {f"{k} drafts": speeds(r, half) for k, r in runs.items()} | {"acceptance": acceptance(runs[K])}
        plain, drafted = out[way]["0 drafts"], out[way][f"{K} drafts"]
        gain = {part: drafted[part] / plain[part] for part in plain}
        out[way]["gain"] = gain
        print(f"{name}, {way}: {equal} of {len(parted)} replies equal; {json.dumps(out[way])}", flush=True)
    out["device_ms"] = parts(sequence, prompts[0] + runs[0][0].tokens[:-8], args.repeats)
    round_ms = out["device_ms"]["round.3.best"]
    out["share"] = {part: out["device_ms"][part] / round_ms for part in ("draft", "verify", "accept")}
    out["memory"], out["queue_us"] = backend.memory(), 1e6 * backend.last_step.queue_s
    told = ("tasks", "device_ms", "share", "memory", "queue_us")
    print(f"{name}: {json.dumps({k: out[k] for k in told})}", flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=BUILT_IN)
    parser.add_argument("--tasks", type=int, default=28)
    parser.add_argument("--tokens", type=int, default=2 * HALF)
    parser.add_argument("--equal", type=int, default=300, help="short replies compared besides, 0 to 910")
    parser.add_argument("--repeats", type=int, default=50, help="replays whose median is a device time")
    parser.add_argument("--budget", type=float, default=400, help="seconds after which no section is begun")
    parser.add_argument("--interpreter", action="store_true", help="without a GPU, at toy sizes")
    args = parser.parse_args()
    if args.interpreter:
        args.tasks, args.tokens, args.repeats, args.budget = 1, 3, 1, float("inf")
    began, results = time.perf_counter(), dict[str, Any]()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        models = interpreted(Path(folder)) if args.interpreter else on_gpu(args, Path(folder))
        toys, prompts = [rng.integers(3, 250, 8).tolist()], list[list[int]]()
        for name, bundle, backend in models:
            if not prompts:
                prompts = toys if args.interpreter else long_tasks(bundle, args.tasks, args.tokens)
            results[name] = measure(name, bundle, backend, prompts, args)
            if name == "gates" and args.equal:
                many = toys if args.interpreter else long_tasks(bundle, args.equal, 0)
                sequence = Sequence(backend, max(map(len, many)) + SHORT_REPLY + 8)
                results["equal"] = check_many(sequence, many, min(SHORT_REPLY, args.tokens))
                print(f"equal: {json.dumps(results['equal'])}", flush=True)
            if name == "gates" and time.perf_counter() - began < args.budget:
                noise = [rng.integers(3, bundle.spec.vocab_size, len(p)).tolist() for p in prompts]
                context = max(map(len, prompts)) + args.tokens + 8
                for what, asked in (("tasks", prompts), ("random text", noise)):
                    for way, sampling in WAYS.items():
                        got = through_engine(bundle, backend, asked, args.tokens, context, sampling)
                        results[f"engine, {what}, {way}"] = got
                        print(f"engine, {what}, {way}: {json.dumps(got)}", flush=True)
            backend.close()
            if time.perf_counter() - began > args.budget:
                break
    print("tokens/s over the first half, greedy:")
    for model in ("plain", "gates"):
        for k in (0, K) if model in results else ():
            print(f"  {model:6} {k} drafts {results[model]['greedy'][f'{k} drafts']['first']:10.1f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
