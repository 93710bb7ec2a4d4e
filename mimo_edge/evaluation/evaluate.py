"""Runs a suite through an engine: every command answered, every text scored, some texts continued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mimo_edge.bundle import Bundle
from mimo_edge.decoding.sampling import Sampler
from mimo_edge.engine import Engine
from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.evaluation import results
from mimo_edge.evaluation.drafts import Acceptance, acceptance, agreements, loops
from mimo_edge.evaluation.intervals import interval
from mimo_edge.evaluation.score import losses, windows
from mimo_edge.evaluation.suites import Command, Suite
from mimo_edge.evaluation.texts import bleu, rouge_l
from mimo_edge.extras import needs_extra
from mimo_edge.request import GREEDY, SamplingParams

if TYPE_CHECKING:
    from mimo_edge.backends.oracle_text import TextReader

LONGEST_REPLY = 1024  # tokens
LONGEST_READ = 4096  # tokens: PyTorch holds all scores of a layer at once
CONTINUED, PROMPT, CONTINUATION = 24, 64, 96  # texts; tokens each
CHUNK = 64  # tokens of a text that are one sample of perplexity's interval

Progress = Callable[[int | None, int | None, str], None]


@dataclass
class _Heads:
    """Collects what the heads would have drafted along texts, and what the gates kept."""

    reader: TextReader | None
    agreed: dict[str, list[NDArray[np.bool_]]] = field(default_factory=dict)
    looping: dict[str, int] = field(default_factory=dict)
    kept: dict[str, list[NDArray[np.float32]]] = field(default_factory=dict)
    long: int = 0

    def add(self, kind: str, prompt: list[int], answer: list[int], sampling: SamplingParams = GREEDY) -> None:
        if self.reader is None:
            return
        if len(prompt) + len(answer) > LONGEST_READ:
            self.long += 1
            return
        reading = self.reader.read([*prompt, *answer], len(prompt) - 1)
        rows = {"prompt": slice(0, len(prompt)), "answer": slice(len(prompt), None)} if kind == "commands" else {}
        for sort, part in (rows or {"text": slice(None)}).items():
            self.kept.setdefault(sort, []).append(reading.kept[:, part])
        self.looping.setdefault(kind, 0)
        self.agreed.setdefault(kind, [])
        if sampling == GREEDY and loops(answer):
            self.looping[kind] += 1
        elif reading.logits:
            drafts = _drafts(reading.logits, len(prompt), len(answer), sampling)
            self.agreed[kind].append(agreements(answer, drafts))

    def drafts(self) -> dict[str, results.Drafts]:
        out = {}
        for kind, texts in self.agreed.items():
            each = [acceptance([t]) for t in texts]
            whole = acceptance(texts)
            if whole.steps:
                length = _length(whole, each)
                out[kind] = results.Drafts(len(texts), self.looping[kind], whole.tokens, length, whole.by_position)
        return out

    def skipped(self) -> dict[str, tuple[float, ...]]:
        joined = {sort: np.concatenate(parts, 1) for sort, parts in self.kept.items()}
        return {sort: tuple((100 * (1 - kept.mean(1))).tolist()) for sort, kept in joined.items() if kept.size}


def _length(whole: Acceptance, each: list[Acceptance]) -> results.Figure:
    return results.Figure(whole.length, *interval([a.tokens for a in each], [a.steps for a in each]))


def _drafts(
    logits: tuple[NDArray[np.float32], ...], prompt: int, count: int, sampling: SamplingParams
) -> NDArray[np.int64]:
    """int64 [heads, count]: what head i drafts for answer token r + 1 + i while token r is pending; -1 behind the end.
    Drawn with the noise of the position it is for, as the engine draws the token itself."""
    sampler = Sampler(sampling, ())
    out = np.full((len(logits), count), -1, np.int64)
    for i, rows in enumerate(logits):
        for r, row in enumerate(rows[:count]):
            out[i, r] = sampler.sample(row, prompt + r + 1 + i)
    return out


def evaluate(engine: Engine, bundle: Bundle, suite: Suite, progress: Progress) -> results.Results:
    """Everything that the suite's samples allow. Raises BadInputError when a sample does not fit the bundle."""
    if suite.commands and bundle.chat_template is None:
        raise BadInputError(
            "this bundle has no chat template, which commands need: use --suite perplexity or a file of texts"
        )
    reader, left_out = _reader(bundle)
    heads = _Heads(reader)
    commands = _commands(engine, suite.commands, heads, progress) if suite.commands else None
    texts = _texts(engine, suite.texts, progress) if suite.texts else None
    if bundle.spec.mtp and reader:
        _continue(engine, suite.texts, heads, progress)
    if heads.long:
        left_out.append(f"{heads.long} texts above {LONGEST_READ} tokens are not in accepted drafts and skipped work")
    return results.Results(
        bundle.manifest.name,
        engine.backend.name,
        suite.name,
        commands,
        texts,
        heads.drafts(),
        heads.skipped(),
        tuple(left_out),
    )


def _reader(bundle: Bundle) -> tuple[TextReader | None, list[str]]:
    gated = any(f.gate for f in bundle.spec.ffn.values())
    if not (bundle.spec.mtp or gated):
        return None, ["this bundle has neither MTP heads nor gates: nothing on accepted drafts and skipped work"]
    try:
        with needs_extra("export", "accepted drafts and skipped work"):
            from mimo_edge.backends.oracle_text import TextReader
    except UnsupportedError as e:
        return None, [f"left out: {e}"]
    return TextReader.open(bundle), []


def _commands(engine: Engine, commands: tuple[Command, ...], heads: _Heads, progress: Progress) -> results.Commands:
    said = []
    for n, command in enumerate(commands):
        progress(n, len(commands), "commands")
        prompt = engine.text.encode_chat(command.messages)
        room = engine.layout.context - len(prompt)
        if room < 1:
            raise BadInputError(f"command {n + 1} has {len(prompt)} tokens and the context {engine.layout.context}")
        generation = engine.generate(prompt, max_tokens=min(LONGEST_REPLY, room))
        said.append("".join(generation))
        heads.add("commands", prompt, list(generation.result.tokens))
    progress(len(commands), len(commands), "commands")
    return judge(commands, said)


def judge(commands: tuple[Command, ...], said: list[str]) -> results.Commands:
    """Answers against what was wanted. The action is an answer's first line where one is wanted, the reply the rest."""
    actions: list[float] = []
    replies: list[tuple[str, str]] = []
    groups: dict[str, list[float]] = {}
    for command, answer in zip(commands, said, strict=True):
        if command.action is not None:
            action, _, answer = answer.partition("\n")
            actions.append(float(action == command.action))
            groups.setdefault(command.group, []).append(actions[-1])
        if command.reply is not None:
            replies.append((answer, command.reply))
    texts, wanted = [r[0] for r in replies], [r[1] for r in replies]
    return results.Commands(
        len(commands),
        _percent(actions),
        _percent([float(a == b) for a, b in replies]),
        _percent(rouge_l(texts, wanted)),
        bleu(texts, wanted) if replies else None,
        {name: (len(found), 100 * float(np.mean(found))) for name, found in sorted(groups.items())},
    )


def _percent(shares: list[float]) -> results.Figure | None:
    if not shares:
        return None
    return results.Figure(100 * float(np.mean(shares)), *(100 * x for x in interval(shares)))


def _texts(engine: Engine, texts: tuple[str, ...], progress: Progress) -> results.Texts:
    sums: list[tuple[float, int]] = []
    for n, text in enumerate(texts):
        progress(n, len(texts), "texts")
        for piece in windows(engine, text):
            found = losses(engine, piece)
            sums += [(float(c.sum()), len(c)) for c in np.split(found, range(CHUNK, len(found), CHUNK))]
    progress(len(texts), len(texts), "texts")
    if not sums:
        raise BadInputError("the texts are too short to score: give at least two tokens")
    loss, count = (np.array(column) for column in zip(*sums, strict=True))
    value = np.exp([loss.sum() / count.sum(), *interval(loss, count)]).tolist()
    return results.Texts(len(texts), int(count.sum()), results.Figure(*value))


def _continue(engine: Engine, texts: tuple[str, ...], heads: _Heads, progress: Progress) -> None:
    """Continues the beginnings of some texts, greedily and sampled at temperature 1."""
    chosen = texts[:CONTINUED]
    for n, text in enumerate(chosen):
        progress(n, len(chosen), "continuations")
        prompt = next(windows(engine, text), [])[: min(PROMPT, engine.layout.context // 2)]
        room = engine.layout.context - len(prompt)
        if not prompt:  # a text of one token
            continue
        for kind, sampling in (("greedy", GREEDY), ("sampled", SamplingParams(temperature=1.0, seed=n))):
            generation = engine.generate(prompt, max_tokens=min(CONTINUATION, room), sampling=sampling)
            for _ in generation:
                pass
            heads.add(kind, prompt, list(generation.result.tokens), sampling)
    if chosen:
        progress(len(chosen), len(chosen), "continuations")
