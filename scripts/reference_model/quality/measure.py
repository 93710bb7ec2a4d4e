"""Runs every model and variant; keeps, in one .npz, what the report needs: bits and sums, no figures yet.

Arrays are named MODEL|VARIANT|WHAT. Variants: dense, gated, shared (gated, all drafts by the first head), and for
curves all:SHARE (one threshold for all layers) and layer:SHARE (a threshold for each layer).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mimo_edge.bundle import WEIGHTS, read_tensors
from mimo_edge.params import parameters
from mimo_edge.spec import read_spec
from scripts.reference_model import checkpoint
from scripts.reference_model.quality.decode import drafts, generate, greedy, sampled
from scripts.reference_model.quality.subject import Pass, Subject
from scripts.reference_model.quality.texts import CONTINUATION, Texts, load_texts, loss_chunks

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
LONGEST_REPLY = 700


class Measurement:
    def __init__(self, subject: Subject, texts: Texts):
        self._subject, self._texts = subject, texts
        self.arrays: dict[str, NDArray] = {}

    def passes(self, name: str, dense: bool) -> tuple[Pass, Pass]:
        """Teacher-forced, over commands and general text."""
        subject, texts = self._subject, self._texts
        commands, general = subject.run(texts.commands, dense), subject.run(texts.general, dense)
        self._keep(name, "matches", np.packbits(texts.answers.matches(texts.commands, commands.best), axis=1))
        self._keep(name, "losses", loss_chunks(texts.general, general.nll))
        self._keep(name, "counts", commands.counts + general.counts)
        return commands, general

    def replies(self, name: str, dense: bool, best: NDArray[np.int16]) -> None:
        """Greedy answers of the commands on which a prediction is wrong; all others answer as the reference does."""
        answers, texts = self._texts.answers, self._texts
        prompts, wrong = [], []
        for n, (ids, _) in enumerate(texts.encoded):
            first, last, row = int(answers.first[n]), int(answers.last[n]), int(answers.row[n])
            said = best[0, row, first - 1 : last].astype(np.int64)
            known = texts.commands.tokens[row, first : last + 1]
            off = np.flatnonzero(said != known)
            if len(off):
                start = len(ids) - (last - first + 1)
                prompts.append([*ids[: start + off[0]], int(said[off[0]])])
                wrong.append((n, start))
        if not prompts:
            return
        made = generate(self._subject, prompts, LONGEST_REPLY, dense, greedy)
        whole = [np.array([*p[s:], *m.tolist()]) for p, m, (_, s) in zip(prompts, made, wrong, strict=True)]
        whole = [cut(w, self._subject.spec.eos_ids) for w in whole]
        self._keep(name, "replied", np.array([n for n, _ in wrong]))
        self._keep(name, "reply_lengths", np.array([len(w) for w in whole]))
        self._keep(name, "reply_tokens", np.concatenate(whole).astype(np.uint16))

    def continuations(self, name: str, dense: bool) -> None:
        """Free continuations of general text and what the heads drafted for them."""
        for kind, choose in (("greedy", greedy), ("sampled", sampled)):
            made = generate(self._subject, self._texts.prompts.tolist(), CONTINUATION, dense, choose)
            self._keep(name, kind, made.astype(np.uint16))
            self._draft(name, kind, dense, made)

    def redraft(self, name: str, source: str) -> None:
        """As `continuations`, over the texts of `source` when the main model is the same."""
        for kind in ("greedy", "sampled"):
            made = self.arrays[f"{source}|{kind}"].astype(np.int64)
            self._keep(name, kind, made.astype(np.uint16))
            self._draft(name, kind, False, made)

    def _draft(self, name: str, kind: str, dense: bool, made: NDArray[np.int64]) -> None:
        choose = greedy if kind == "greedy" else sampled
        found = drafts(self._subject, self._texts.prompts, made, dense, choose)
        self._keep(name, f"{kind}_drafts", found.astype(np.int16))

    def _keep(self, name: str, what: str, array: NDArray) -> None:
        self.arrays[f"{name}|{what}"] = array


def cut(tokens: NDArray[np.int64], ends: tuple[int, ...]) -> NDArray[np.int64]:
    """Up to the first end token, which is left out."""
    at = np.flatnonzero(np.isin(tokens, ends))
    return tokens[: at[0]] if len(at) else tokens


def measure(args: argparse.Namespace, bundles: dict[str, Path]) -> None:
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = args.float or next(iter(bundles.values()))
    spec = read_spec(source / "spec.json")
    texts = load_texts(args.data, args.length, args.limit)
    measurement = Measurement(Subject(spec, device, args.batch, args.length, not args.eager), texts)
    answered = int((texts.answers.last - texts.answers.first + 1).sum())
    print(f"{len(texts.encoded)} commands, {answered} tokens in answers, general rows {texts.general.tokens.shape}")
    try:
        for name in _plan(measurement, args, bundles):
            if device.type == "cuda":
                torch.cuda.synchronize()
            print(f"{time.monotonic() - began:6.1f} s  {name}", flush=True)
            if time.monotonic() - began > 60 * args.minutes:
                print("out of time: the rest is left out")
                break
    finally:  # what was measured before an error is worth its time
        args.out.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(args.out, answers=np.array([len(texts.encoded), answered]), **measurement.arrays)


def _plan(m: Measurement, args: argparse.Namespace, bundles: dict[str, Path]) -> Iterator[str]:
    """Does one piece of work after another, the most wanted first; yields its name."""
    subject = m._subject
    weights = {"float": checkpoint.read(args.float)} if args.float else {}
    weights |= {name: bundle_weights(folder) for name, folder in bundles.items()}
    values = {}
    for model, w in weights.items():
        subject.load(w)
        for variant in ("dense", "gated"):
            name, dense = f"{model}|{variant}", variant == "dense"
            commands, general = m.passes(name, dense)
            yield name
            if args.brief:
                continue
            m.replies(name, dense, commands.best)
            yield f"{name} replies"
            m.continuations(name, dense)
            yield f"{name} continuations"
        values[model] = np.concatenate([commands.values, general.values], 1)
    for model in args.heads:
        subject.load(weights[model])
        subject.share_first_head()
        m.passes(f"{model}|shared", False)
        if not args.brief:
            m.redraft(f"{model}|shared", f"{model}|gated")
        yield f"{model}|shared"
    for model in args.curve:
        subject.load(weights[model])
        for share in SHARES:
            for rule, by in shifts(values[model], share).items():
                subject.shift(by)
                m.passes(f"{model}|{rule}:{share}", False)
                yield f"{model}|{rule}:{share}"


def shifts(values: NDArray[np.float32], share: float) -> dict[str, list[float]]:
    """Additions to the thresholds of every layer that skip `share` of the blocks of rows with these gate values
    [layers, n, blocks], as long as other layers' skipping does not change them."""
    edge = float(np.quantile(values, share)) if share else float("-inf")
    edges = [float(np.quantile(v, share)) if share else float("-inf") for v in values]
    low = float(values.min()) - 1e3  # -inf as a bias would be NaN beside an infinite value
    return {"all": [max(edge, low)] * len(values), "layer": [max(e, low) for e in edges]}


def bundle_weights(folder: Path) -> dict[str, Tensor]:
    """Every parameter of a bundle, float32, exactly as its integers and scales say."""
    spec = read_spec(folder / "spec.json")
    tensors = read_tensors(folder / WEIGHTS)
    out = {}
    for p in parameters(spec):
        quant = spec.quant.of(p.kind)
        stored = (
            [np.array(tensors[p.name])]
            if quant is None
            else [np.array(tensors[f"{p.name}.{part}"]) for part in ("q", "scales", "zeros")]
        )
        out[p.name] = torch.from_numpy(stored[0] if quant is None else dequantize(*stored, bits=quant.bits))
    return out


def dequantize(q: NDArray[np.uint8], scales: NDArray, zeros: NDArray[np.uint8], bits: int) -> NDArray[np.float32]:
    """params.stored's layout -> float32 [N, K]."""
    n, groups, _ = q.shape
    integers, zero = (x if bits == 8 else np.stack([x & 15, x >> 4], -1).reshape(*x.shape[:-1], -1) for x in (q, zeros))
    away = integers.astype(np.float32) - zero[:, :groups, None].astype(np.float32)
    return (away * scales[..., None].astype(np.float32)).reshape(n, -1)
