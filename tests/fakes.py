"""A model without weights: a tokenizer of bytes, and a backend whose next token is a rule over the tokens it can see.

The backend keeps tokens where a real one keeps keys and values, so an engine that reads or overwrites a wrong slot
gives another text or fails.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from mimo_edge.backends.base import StepOutput
from mimo_edge.bundle import CHAT_TEMPLATE, TOKENIZER, WEIGHTS, BundleWriter
from mimo_edge.engine import Engine
from mimo_edge.kv.windows import first_visible, ring_positions
from mimo_edge.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec
from mimo_edge.text import Text

BOS, EOS = 256, 257
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token of its own value, 256 begins a text, 257 ends one."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's names of bytes
    names = {b: chr(b) for b in printable}
    names |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in names)}
    tokenizer = Tokenizer(models.BPE({names[b]: b for b in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
    return tokenizer


def fake_spec(context: int = 64, window: int = 5) -> ModelSpec:
    full = AttentionSpec(1, 1, 2, 2, 2, 1e4, 1.0)
    return ModelSpec(
        family="fake",
        vocab_size=258,
        hidden_size=8,
        max_context=context,
        norm_eps=1e-6,
        attention={"full": full, "window": AttentionSpec(1, 1, 2, 2, 2, 1e4, 1.0, window=window)},
        ffn={"dense": FeedForwardSpec(8)},
        layers=(LayerSpec("full", "dense"), LayerSpec("window", "dense")),
        bos_id=BOS,
        eos_ids=(EOS,),
    )


def fake_text(spec: ModelSpec, template: str | None = TEMPLATE) -> Text:
    return Text(byte_tokenizer(), spec, template)


def scramble(tokens: list[int]) -> int:
    """A printable token that depends on all tokens and their order."""
    h = 0
    for t in tokens:
        h = (h * 31 + t + 7) % 1_000_003
    return 97 + h % 26


def script(reply: str | bytes, prompt_tokens: int):
    """A rule that answers a prompt of so many tokens with `reply`, then the end token."""
    data = reply.encode() if isinstance(reply, str) else reply
    return lambda tokens: data[i] if (i := len(tokens) - prompt_tokens) < len(data) else EOS


class FakeBackend:
    """`rule` maps all tokens up to a row to the token that follows it."""

    name = "fake"
    row_format = "fake"

    def __init__(self, rule=scramble):
        self.rule, self.runs, self.closed = rule, [], False
        self._rows = []

    def allocate(self, layout):
        self.layout = layout
        self._full = np.full(layout.pages * layout.page_size, -1)
        kinds = layout.spec.attention
        self._sizes = {kind: r for kind, r in layout.rings.items() if kind in kinds}
        self._rings = {kind: np.full(layout.sequences * r, -1) for kind, r in self._sizes.items()}

    def run(self, steps):
        assert not self.closed
        outputs = []
        for step in steps:
            past = self._past(step)
            logits = np.zeros((len(step.logit_rows), self.layout.spec.vocab_size), np.float32)
            for i, row in enumerate(step.logit_rows):
                logits[i, self.rule([*past, *step.tokens[: row + 1].tolist()])] = 1
            outputs.append(StepOutput(logits))
        self._rows = list(steps)
        self.runs.append([len(s.tokens) for s in steps])
        return outputs

    def commit(self, accepted):
        for step, rows in zip(self._rows, accepted, strict=True):
            for p, token in enumerate(step.tokens[:rows].tolist(), step.start):
                self._full[self._slot(step.slots, p)] = token
                for kind, r in self._sizes.items():
                    self._rings[kind][step.slots.ring * r + p % r] = token
        self._rows = []

    def read_rows(self, slots, kind, first, last, out):
        rows = out.view(np.int64).reshape(last - first, -1)
        rows[:, 0] = [self._held(slots, kind)[self._at(slots, kind, p)] for p in range(first, last)]
        rows[:, 1] = np.arange(first, last)

    def write_rows(self, slots, kind, first, last, rows):
        rows = rows.view(np.int64).reshape(last - first, -1)
        assert rows[:, 1].tolist() == list(range(first, last)), "rows of other positions"
        for p, token in enumerate(rows[:, 0].tolist(), first):
            assert token >= 0, "a row was stored that was never committed"
            self._held(slots, kind)[self._at(slots, kind, p)] = token

    def _held(self, slots, kind):
        return self._rings.get(kind, self._full)

    def _at(self, slots, kind, position):
        r = self.layout.rings.get(kind)
        return self._slot(slots, position) if r is None else slots.ring * r + position % r

    def close(self):
        self.closed = True

    def _slot(self, slots, position):
        size = self.layout.page_size
        return slots.pages[position // size] * size + position % size

    def _past(self, step):
        past = [int(self._full[self._slot(step.slots, p)]) for p in range(step.start)]
        assert -1 not in past, "a row was read that was never committed"
        for kind, r in self._sizes.items():
            oldest = first_visible(step.start, self.layout.spec.attention[kind].window)
            for slot, p in enumerate(ring_positions(step.start, r).tolist()):
                if p >= oldest:
                    assert self._rings[kind][step.slots.ring * r + slot] == past[p], f"ring slot {slot} lost row {p}"
        return past


def fake_engine(
    rule=scramble, *, context=64, window=5, sessions=1, chunk=256, template=TEMPLATE, cache=None, queue=0
) -> Engine:
    spec = fake_spec(context, window)
    text = fake_text(spec, template)
    return Engine(spec, text, FakeBackend(rule), sessions=sessions, chunk=chunk, cache=cache, queue=queue)


def reply(engine, prompt, **options):
    """The result of a whole reply of an engine or a session."""
    generation = engine.generate(prompt, **options)
    pieces = list(generation)
    assert "".join(pieces) == generation.result.text
    return generation.result


def assert_nothing_is_taken(engine):
    engine.pools.check_integrity()
    assert engine.pools.pages.used == engine.pools.rings.used == 0


def fake_bundle(out: Path, context: int) -> str:
    """A bundle without weights, for the fake backend; its path."""
    with BundleWriter(out) as writer:
        writer.path(WEIGHTS).write_bytes(b"")
        writer.path(TOKENIZER).write_text(byte_tokenizer().to_str())
        writer.path(CHAT_TEMPLATE).write_text(TEMPLATE)
        writer.finish(fake_spec(context=context), "cpu", "Fake")
    return str(out)
