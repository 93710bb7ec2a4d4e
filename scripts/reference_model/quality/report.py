"""Figures out of measure's files: everything compared with the baseline, command by command."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mimo_edge.evaluation.drafts import acceptance, agreements, loops
from mimo_edge.evaluation.intervals import interval
from mimo_edge.evaluation.texts import bleu, chrf, rouge_l
from scripts.reference_model.chat import END, SPECIAL
from scripts.reference_model.intents import frequencies
from scripts.reference_model.packing import ACTION, REPLY
from scripts.reference_model.prepare import load_encoded
from scripts.reference_model.quality.subject import SORTS

Arrays = dict[str, NDArray]


@dataclass(frozen=True)
class Reference:
    """What is right: texts of actions and replies, lengths of answers and of their actions, which commands are rare."""

    actions: list[str]
    replies: list[str]
    length: NDArray[np.int64]
    action: NDArray[np.int64]
    rare: NDArray[np.bool_]
    tokenizer: Tokenizer


def reference(data: Path, tokenizer: Tokenizer) -> Reference:
    """Rare intents: the third that training draws least."""
    encoded, groups = load_encoded(data / "commands.npz")
    parts = [
        [[i for i, k in zip(ids, kinds, strict=True) if k == kind] for ids, kinds in encoded]
        for kind in (ACTION, REPLY)
    ]
    actions, replies = (tokenizer.decode_batch(p, skip_special_tokens=True) for p in parts)
    order = frequencies()[0]
    rare = set(order[-(len(order) // 3) :])
    sizes = np.array([[len(a), len(b)] for a, b in zip(*parts, strict=True)])
    return Reference(
        [a.removesuffix("\n") for a in actions],
        replies,
        sizes.sum(1),
        sizes[:, 0],
        np.array([i in rare for i in groups["intent"]]),
        tokenizer,
    )


@dataclass(frozen=True)
class Bits:
    """Of every command: whether the action and the reply are right, and ROUGE-L of the reply (None: not decoded)."""

    action: NDArray[np.float64]
    reply: NDArray[np.float64]
    rouge: NDArray[np.float64] | None
    texts: list[str] | None


def matches(arrays: Arrays, ref: Reference) -> list[NDArray[np.bool_]]:
    flat = np.unpackbits(arrays["matches"], axis=1, count=int(ref.length.sum())).astype(bool)
    return np.split(flat, ref.length.cumsum()[:-1], axis=1)


def bits(arrays: Arrays, ref: Reference) -> Bits:
    right = [m[0] for m in matches(arrays, ref)]
    action = np.array([r[:a].all() for r, a in zip(right, ref.action, strict=True)], np.float64)
    reply = np.array([r[a:].all() for r, a in zip(right, ref.action, strict=True)], np.float64)
    if "replied" not in arrays:
        return Bits(action, reply, None, None)
    texts = list(ref.replies)
    pieces = np.split(arrays["reply_tokens"], arrays["reply_lengths"].cumsum()[:-1])
    for n, tokens in zip(arrays["replied"], pieces, strict=True):
        texts[n] = ref.tokenizer.decode(tokens.tolist(), skip_special_tokens=True).partition("\n")[2]
    return Bits(action, reply, np.array(rouge_l(texts, ref.replies)), texts)


def percent(values: NDArray[np.float64]) -> list[float]:
    """[mean, low, high] in points."""
    return [100 * float(values.mean()), *(100 * x for x in interval(values))]


def command_figures(own: Bits, base: Bits, dense: Bits, ref: Reference) -> dict:
    out: dict = {}
    for name, which in (("all", np.ones_like(ref.rare)), ("rare", ref.rare)):
        out[name] = {"commands": int(which.sum())}
        for what in ("action", "reply", "rouge"):
            mine, theirs, undone = (getattr(b, what) for b in (own, base, dense))
            if mine is None:
                continue
            out[name][what] = percent(mine[which])
            if theirs is not None:
                out[name][f"{what}_to_baseline"] = percent((mine - theirs)[which])
            if undone is not None:
                out[name][f"{what}_to_dense"] = percent((mine - undone)[which])
    if own.texts is not None:
        out["bleu"], out["chrf"] = bleu(own.texts, ref.replies), chrf(own.texts, ref.replies)
    return out


def perplexity_figures(own: Arrays, others: dict[str, Arrays]) -> dict:
    """Perplexity of general text, and its ratio to others' on the same rows."""
    loss, count = own["losses"].T
    out: dict = {"perplexity": [float(np.exp(loss.sum() / count.sum())), *map(float, np.exp(interval(loss, count)))]}
    for name, other in others.items():
        theirs = other["losses"].T
        if np.array_equal(theirs[1], count):
            change = np.exp([(loss - theirs[0]).sum() / count.sum(), *interval(loss - theirs[0], count)])
            out[f"loss_to_{name}_percent"] = (100 * (change - 1)).tolist()
    return out


def skip_figures(arrays: Arrays) -> dict:
    """Percent of blocks skipped: by sort of rows, by layer, and what the union of 2 and 4 consecutive rows leaves."""
    c = arrays["counts"]
    shares = {"one": (0, 1), "union2": (2, 3), "union4": (4, 5)}

    def skipped(x: NDArray, pair: tuple[int, int]) -> NDArray[np.float64]:
        return 100 * (1 - x[..., pair[0]] / np.maximum(x[..., pair[1]], 1))

    out: dict = {s: {k: float(skipped(c.sum(0)[i], p)) for k, p in shares.items()} for i, s in enumerate(SORTS)}
    commands = c[:, :2].sum(1)
    out["commands"] = {k: float(skipped(commands.sum(0), p)) for k, p in shares.items()}
    out["layers"] = {"commands": skipped(commands, (0, 1)).tolist()}
    out["layers"] |= {s: skipped(c[:, i], (0, 1)).tolist() for i, s in enumerate(SORTS)}
    return out


def draft_figures(arrays: Arrays, own: Bits, ref: Reference) -> dict:
    """Mean accepted length of 1 + heads, by position, and with fewer heads; greedy texts that loop are left out."""
    right = (own.action * own.reply).astype(bool)
    kinds = {"commands": [m[1:] for m, ok in zip(matches(arrays, ref), right, strict=True) if ok]}
    looping = None
    for kind in ("greedy", "sampled"):
        if kind not in arrays:
            continue
        texts = [ended(t) for t in arrays[kind].astype(np.int64)]
        made = [
            agreements(t, d[:, : len(t)]) for t, d in zip(texts, arrays[f"{kind}_drafts"].swapaxes(0, 1), strict=True)
        ]
        if kind == "greedy":
            held = [not loops(t) for t in texts]
            made, looping = [m for m, ok in zip(made, held, strict=True) if ok], held.count(False) / len(held)
        kinds[f"general_{kind}"] = made
    out: dict = {"looping": looping}
    for kind, texts in kinds.items():
        if not texts:  # far along the curve no command is right
            continue
        each = [acceptance([t]) for t in texts]
        whole, tokens, steps = acceptance(texts), [a.tokens for a in each], [a.steps for a in each]
        out[kind] = {
            "tokens": whole.tokens,
            "length": [whole.length, *interval(tokens, steps)],
            "by_position": whole.by_position,
            "with_heads": [acceptance(texts, n).length for n in range(1, len(texts[0]) + 1)],
        }
    return out


def ended(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Up to and with the first END."""
    at = np.flatnonzero(tokens == SPECIAL.index(END))
    return tokens[: at[0] + 1] if len(at) else tokens


def report(args: argparse.Namespace) -> None:
    variants: dict[str, Arrays] = {}
    for path in args.files:
        with np.load(path) as f:
            for key in f.files:
                if "|" in key:
                    name, what = key.rsplit("|", 1)
                    variants.setdefault(name, {})[what] = f[key]
    ref = reference(args.data, Tokenizer.from_file(str(args.checkpoint / "tokenizer.json")))
    found = {name: bits(arrays, ref) for name, arrays in variants.items()}
    base = f"{args.baseline}|dense"
    results: dict = {}
    for name, arrays in variants.items():
        dense = f"{name.split('|')[0]}|dense"
        results[name] = {
            "commands": command_figures(found[name], found[base], found[dense], ref),
            "general": perplexity_figures(arrays, {"baseline": variants[base], "dense": variants[dense]}),
            "skipped": skip_figures(arrays),
            "drafts": draft_figures(arrays, found[name], ref),
        }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "quality.json").write_text(json.dumps(results, indent=1))
    plot(results, args.out / "quality_against_skipping.png")
    table(results)


def table(results: dict) -> None:
    """One line a variant; the intervals are those of the paired difference to the baseline."""
    print(f"{'':22} actions, %  to the baseline: all       rare intents         ROUGE-L  perplexity", end="")
    print("  skipped, %: commands/answers/text  tokens a step: commands/text greedy/text sampled")
    for name, r in results.items():
        commands, skipped, drafts = r["commands"], r["skipped"], r["drafts"]
        whole = commands["all"]
        differences = ["{:+.2f} [{:+.2f}, {:+.2f}]".format(*commands[k]["action_to_baseline"]) for k in ("all", "rare")]
        rouge = f"{whole['rouge'][0]:.2f}" if "rouge" in whole else "-"
        shares = "/".join(f"{skipped[k]['one']:.0f}" for k in ("commands", "answer", "general"))
        kinds = [k for k in ("commands", "general_greedy", "general_sampled") if k in drafts]
        print(f"{name:22} {whole['action'][0]:10.2f}  {differences[0]:>21}  {differences[1]:>21}  {rouge:>7}", end="")
        print(f"  {r['general']['perplexity'][0]:10.3f}  {'-' if name.endswith('|dense') else shares:>10}  ", end="")
        print("/".join(f"{drafts[k]['length'][0]:.2f}" for k in kinds))


def plot(results: dict, path: Path) -> None:
    """Exact actions and perplexity over the share of work that answers' and all commands' rows skip."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves: dict[str, list[str]] = {}
    for name in results:
        if point := re.fullmatch(r"(.+)\|(all|layer):[\d.]+", name):
            curves.setdefault(
                f"{point[1]}, {'one threshold' if point[2] == 'all' else 'a threshold a layer'}", []
            ).append(name)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for label, names in curves.items():
        color = left.plot([], [])[0].get_color()
        for sort, style in (("commands", "-"), ("answer", ":")):
            x = [results[n]["skipped"][sort]["one"] for n in names]
            y = [results[n]["commands"]["all"]["action"] for n in names]
            left.errorbar(
                x,
                [v[0] for v in y],
                yerr=np.transpose([(v[0] - v[1], v[2] - v[0]) for v in y]),
                fmt=f"{style}o",
                ms=3,
                color=color,
                label=f"{label}, rows of {'answers' if sort == 'answer' else 'commands'}",
            )
        x = [results[n]["skipped"]["general"]["one"] for n in names]
        right.plot(x, [results[n]["general"]["perplexity"][0] for n in names], "-o", ms=3, color=color, label=label)
    for axes, title in ((left, "exact actions, % of held-out commands"), (right, "perplexity of general text")):
        axes.set(xlabel="feed-forward blocks skipped, %", title=title)
        axes.grid(alpha=0.3)
        if curves:
            axes.legend(fontsize=7)
    right.set_yscale("log")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
