"""Decoding many sequences at once with a cache: replies from where they leave the reference, and free continuations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from scripts.reference_model.model import rms_norm, rotate
from scripts.reference_model.packing import GENERAL, LOOKAHEAD, Rows
from scripts.reference_model.quality.subject import GateReading, Subject

PREFILL = 32  # sequences at a time
SEED = 11

Choose = Callable[[Tensor, int], Tensor]  # (logits [B, vocab], number of the new token) -> tokens int64 [B]


class Decoder:
    """Keys and values of B sequences of at most `capacity` tokens, each from position 0 on. A row sees what was
    written last at earlier positions, so that padding behind a prompt is overwritten before anything sees it."""

    def __init__(self, subject: Subject, sequences: int, capacity: int, dense: bool):
        self._subject, self.capacity, model = subject, capacity, subject.model
        self._off = torch.full((sequences,), dense, device=subject.device)
        kind = torch.float16 if subject.device.type == "cuda" else torch.float32

        def cache(a, dim: int) -> Tensor:
            return torch.zeros(sequences, a.kv_heads, capacity, dim, dtype=kind, device=subject.device)

        self._cache = [(cache(layer.a, layer.a.head_dim), cache(layer.a, layer.a.v_head_dim)) for layer in model.layers]

    def extend(self, tokens: Tensor, positions: Tensor, which: slice, end: int) -> Tensor:
        """tokens, positions int64 [b, T] of sequences `which`; no position is above `end`. Normed hidden states."""
        model, spec = self._subject.model, self._subject.spec
        keys = torch.arange(end, device=tokens.device)
        seen = keys <= positions[..., None]
        x = F.embedding(tokens, model.embed) * spec.embed_scale
        use = GateReading(self._off[which])
        with self._subject.autocast():
            for layer, kinds, (k_all, v_all) in zip(model.layers, spec.layers, self._cache, strict=True):
                a = layer.a
                near = seen if a.window is None else seen & (keys > positions[..., None] - a.window)
                table = model.tables[kinds.attention][:, positions]
                h = rms_norm(x, layer.attn_norm, layer.eps)
                q, k, v = F.linear(h, layer.qkv).split([a.q_rows, a.k_rows, a.v_rows], dim=-1)
                q = rotate(q.unflatten(-1, (a.heads, a.head_dim)), table)
                k = rotate(k.unflatten(-1, (a.kv_heads, a.head_dim)), table)
                at = torch.arange(len(self._off), device=tokens.device)[which, None]
                k_all[at, :, positions] = k.to(k_all.dtype)
                v_all[at, :, positions] = (v.unflatten(-1, (a.kv_heads, a.v_head_dim)) * a.value_scale).to(v_all.dtype)
                y = attend(a, near, q, k_all[which, :, :end], v_all[which, :, :end], layer)
                x = x + F.linear(y, layer.o, layer.o_bias)
                y, _ = layer._feed_forward(rms_norm(x, layer.ffn_norm, layer.eps), use)
                x = x + y
        return rms_norm(x, model.norm, spec.norm_eps)


def attend(a, seen: Tensor, q: Tensor, k: Tensor, v: Tensor, layer) -> Tensor:
    """q [b, T, heads, D], k [b, kv_heads, L, D], v [b, kv_heads, L, Dv], seen bool [b, T, L] -> [b, T, heads * Dv]."""
    b, t = q.shape[:2]
    q = q.unflatten(2, (a.kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [b, kv_heads, group, T, D]
    group = q.shape[2]
    scores = (q.flatten(2, 3) @ k.mT).float().unflatten(2, (group, t)) * a.scale
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if a.sinks:
        column = layer.sinks.float().view(1, a.kv_heads, group, 1, 1).expand(b, -1, -1, t, 1)
        scores = torch.cat([scores, column], dim=-1)
    probs = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    y = (probs.flatten(2, 3) @ v).unflatten(2, (group, t))
    return y.permute(0, 3, 1, 2, 4).flatten(2)


@torch.no_grad()
def generate(
    subject: Subject, prompts: Sequence[Sequence[int]], steps: int, dense: bool, choose: Choose
) -> NDArray[np.int64]:
    """`steps` tokens behind every prompt, [B, steps]; ends early when all sequences have ended."""
    device, lengths = subject.device, [len(p) for p in prompts]
    decoder = Decoder(subject, len(prompts), max(lengths) + steps, dense)
    ends = torch.tensor(subject.spec.eos_ids, device=device)
    position = torch.tensor(lengths, device=device)
    hidden = torch.cat(
        [_prefill(decoder, prompts[i : i + PREFILL], i, device) for i in range(0, len(prompts), PREFILL)]
    )
    out = [choose(subject.logits(hidden), 0)]
    ended = torch.isin(out[0], ends)
    step = partial(_step, subject, decoder)
    if device.type == "cuda" and steps > 1:
        step = _captured(step, out[0], position)
    for number in range(1, steps):
        if number % 16 == 0 and bool(ended.all()):
            break
        out.append(choose(step(out[-1], position), number))
        ended |= torch.isin(out[-1], ends)
        position = position + 1
    return torch.stack(out, 1).cpu().numpy()


def _step(subject: Subject, decoder: Decoder, tokens: Tensor, positions: Tensor) -> Tensor:
    """Logits [B, vocab] behind one more token of every sequence."""
    x = decoder.extend(tokens[:, None], positions[:, None], slice(0, len(tokens)), decoder.capacity)
    return subject.logits(x[:, 0])


def _captured(step: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, positions: Tensor):
    """The step as one CUDA graph: it is hundreds of small launches. Its result is overwritten by the next one."""
    held = tokens.clone(), positions.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*held)  # libraries set themselves up; the rows written are written again
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*held)

    def replay(tokens: Tensor, positions: Tensor) -> Tensor:
        held[0].copy_(tokens)
        held[1].copy_(positions)
        graph.replay()
        return out

    return replay


def _prefill(decoder: Decoder, prompts: Sequence[Sequence[int]], first: int, device: torch.device) -> Tensor:
    """Hidden states [b, hidden] of the prompts' last tokens."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[*p, *[0] * (width - len(p))] for p in prompts], device=device)
    positions = torch.arange(width, device=device).expand_as(tokens)
    x = decoder.extend(tokens, positions, slice(first, first + len(prompts)), width)
    return x[torch.arange(len(prompts), device=device), torch.tensor([len(p) - 1 for p in prompts], device=device)]


def greedy(logits: Tensor, _: int) -> Tensor:
    return logits.argmax(-1)


def sampled(logits: Tensor, number: int) -> Tensor:
    """Temperature 1: the best token under noise that belongs to the position alone (Gumbel-max), so that a draft made
    for the same position is drawn with the same noise."""
    generator = torch.Generator(logits.device).manual_seed(SEED * 100_003 + number)
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - noise.log()).argmax(-1)


@torch.no_grad()
def drafts(
    subject: Subject, prompts: NDArray[np.int64], tokens: NDArray[np.int64], dense: bool, choose: Choose
) -> NDArray[np.int64]:
    """What head i drafts while token r of the continuation is pending, int64 [heads, B, steps].

    prompts [B, P], tokens [B, steps]. Row p = P - 1 + r of head i sees tokens up to p + 1 + i, which are the text's own
    as long as all drafts before were accepted, and drafts continuation token r + 1 + i.
    """
    texts = np.concatenate([prompts, tokens], 1)
    (count, width), steps = texts.shape, tokens.shape[1]
    each = subject.length // width
    held: list[list[Tensor]] = [[] for _ in range(subject.heads)]
    for at in range(0, count, each * subject.batch):
        part = texts[at : at + each * subject.batch]
        hidden, _, _ = subject.hidden(_rows(part, subject.batch, subject.length), dense)
        for rows, h in zip(held, hidden[1:], strict=True):
            rows.append(h[:, : each * width].unflatten(1, (each, width)).flatten(0, 1)[: len(part)])
    out = np.full((subject.heads, count, steps), -1, np.int64)
    for i, rows in enumerate(map(torch.cat, held)):
        for r in range(steps - 1 - i):
            logits = subject.logits(rows[:, prompts.shape[1] - 1 + r])
            out[i, :, r] = choose(logits, r + 1 + i).cpu().numpy()
    return out


def _rows(texts: NDArray[np.int64], count: int, length: int) -> Rows:
    """Texts of one width as documents, one after another in `count` rows."""
    width, each = texts.shape[1], length // texts.shape[1]
    held = np.zeros((count * each, width), np.uint16)
    held[: len(texts)] = texts
    tokens = np.zeros((count, length + LOOKAHEAD), np.uint16)
    tokens[:, : each * width] = held.reshape(count, -1)
    at = np.arange(length + LOOKAHEAD)
    document, position = np.minimum(at // width, each), np.where(at < each * width, at % width, at - each * width)
    shape = tokens.shape
    return Rows(
        tokens,
        np.broadcast_to(document, shape).astype(np.int16),
        np.full(shape, GENERAL, np.uint8),
        np.broadcast_to(position, shape).astype(np.int32),
    )
