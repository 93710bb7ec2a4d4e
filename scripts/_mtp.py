"""What checks and benchmarks of MTP decoding share: prompts, a bundle without its gates, how far rounding goes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mimo_edge.backends.base import Step
from mimo_edge.bundle import CHAT_TEMPLATE, TOKENIZER, WEIGHTS, Bundle, BundleWriter
from mimo_edge.engine import Engine
from mimo_edge.evaluation.suites import load_suite
from mimo_edge.export.pipeline import write_graphs
from mimo_edge.tensors import read_header


def without_gates(bundle: Path, out: Path) -> Path:
    """The same weights with every feed-forward block computed."""
    source = Bundle.open(bundle)
    spec = replace(source.spec, ffn={name: replace(f, gate=None) for name, f in source.spec.ffn.items()})
    with BundleWriter(out) as writer:
        shutil.copy(source.file(WEIGHTS), writer.path(WEIGHTS))
        write_graphs(writer, spec, read_header(source.file(WEIGHTS)))
        for name in (TOKENIZER, CHAT_TEMPLATE):
            writer.path(name).write_bytes(source.file(name).read_bytes())
        writer.finish(spec, "cpu", f"{source.manifest.name}, no gates")
    return out


def commands(engine: Engine, least_reply: int = 0) -> Iterator[list[int]]:
    """Held-out commands as prompts; of those whose reply has `least_reply` tokens or more."""
    for c in load_suite("commands").commands:
        wanted = engine.text.encode("\n".join(filter(None, (c.action, c.reply))), special=False)
        if len(wanted) >= least_reply:
            yield engine.text.encode_chat(list(c.messages))


def texts(engine: Engine, tokens: int, stride: int | None = None) -> Iterator[list[int]]:
    """Pieces of general text of so many tokens, that begin `stride` tokens apart."""
    for text in load_suite("perplexity").texts:
        ids = engine.text.encode(text)
        yield from (ids[i : i + tokens] for i in range(0, len(ids) - tokens, stride or 4 * tokens))


def random_tokens(engine: Engine, tokens: int, count: int, seed: int = 0) -> list[list[int]]:
    """Prompts that mean nothing."""
    r = np.random.default_rng(seed)
    return [r.integers(3, engine.spec.vocab_size, tokens).tolist() for _ in range(count)]


def logits_behind(engine: Engine, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Float32 [vocab], as plain decoding gets them: the last row in a step of its own."""
    return rows_in_steps(engine, [*tokens], [1])[-1]


def rows_in_steps(engine: Engine, tokens: Sequence[int], sizes: Sequence[int]) -> NDArray[np.float32]:
    """Logits of the last sum(sizes) rows, evaluated in steps of these sizes behind chunks of the rest."""
    with engine.session() as session:
        at, out = 0, []
        rest = len(tokens) - sum(sizes)
        steps = [min(engine.chunk, rest - i) for i in range(0, rest, engine.chunk)]
        for i, size in enumerate([*steps, *sizes]):
            part = np.array(tokens[at : at + size], np.int64)
            wanted = np.arange(size if i >= len(steps) else 0)
            [output] = engine.backend.run([Step(session.sequence.slots, at, part, wanted)])
            out.append(output.logits.copy())
            engine.backend.commit([size])
            at += size
        return np.concatenate(out)
