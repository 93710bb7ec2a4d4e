"""How much the model's loss minds a change of the residual stream: one metric for all layers.

A change d_t of the stream behind layer l raises the loss by about 1/2 d_t' F_l d_t, F_l = E[g_t g_t'] the Fisher matrix
of gradients g of log probabilities of tokens drawn from the model itself (Kunstner et al. 2019, arXiv 1905.12558, on
why drawn ones). Gradients and changes are taken relative to the row's length, which evens out the very long rows
of first tokens. Forwards and backwards hold one layer's weights and the layers' inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mimo_edge.backends import oracle
from mimo_edge.export.gates.feed_forward import float_weights
from mimo_edge.export.quantize.perplexity import LayerWeights, Source
from mimo_edge.spec import ModelSpec

_HEAD_BYTES = 64 << 20
_SHRINK = 0.1  # share of the mean eigenvalue mixed in: fewer rows than dimensions make a singular matrix


def metrics(
    spec: ModelSpec, source: Source, texts: Sequence[Tensor], seed: int, progress: Callable[[int, int], None]
) -> list[Tensor]:
    """For each layer a matrix R [hidden, hidden]: |R d|^2 nats a row for a change d relative to the row's length.

    texts int64 [T] each; `progress` gets (layers done forwards and backwards, twice the layers).
    """
    weights, count = float_weights(spec, source), len(spec.layers)
    sizes = [len(text) for text in texts]
    states = [weights.rows("embed", torch.cat(list(texts))) * spec.embed_scale]
    for i in range(count):
        weights.clear()
        states.append(torch.cat([_block(spec, weights, i, part) for part in states[-1].split(sizes)]))
        progress(i + 1, 2 * count)
    gradient = _through_head(spec, source, weights, states[-1], seed)
    found: list[Tensor] = []
    for i in reversed(range(count)):
        found.append(_metric(gradient, states.pop()))
        weights.clear()
        parts = zip(states[-1].split(sizes), gradient.split(sizes), strict=True)
        gradient = torch.cat([_pull(spec, weights, i, x, g) for x, g in parts])
        progress(2 * count - i, 2 * count)
    return found[::-1]


def _block(spec: ModelSpec, weights: LayerWeights, i: int, x: Tensor) -> Tensor:
    kinds = spec.layers[i]
    return oracle.block(spec, weights, f"layers.{i}", kinds.attention, kinds.ffn, x, torch.arange(len(x)), None)[0]


def _pull(spec: ModelSpec, weights: LayerWeights, i: int, x: Tensor, gradient: Tensor) -> Tensor:
    """Gradient in front of layer `i` from the one behind it."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (pulled,) = torch.autograd.grad(_block(spec, weights, i, x), x, gradient)
    return pulled


def _metric(gradient: Tensor, x: Tensor) -> Tensor:
    g = gradient * x.norm(dim=-1, keepdim=True)
    fisher = (g.T @ g).double() / (2 * len(g))
    size = fisher.diagonal().mean()
    fisher = (1 - _SHRINK) * fisher + _SHRINK * size * torch.eye(len(fisher), dtype=torch.float64)
    return torch.linalg.cholesky(fisher).T.float()


def _through_head(spec: ModelSpec, source: Source, weights: LayerWeights, x: Tensor, seed: int) -> Tensor:
    """Gradient in front of the final norm of -log p(drawn token), float32 [T, hidden]; the head in blocks of rows."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        normed = oracle.rms_norm(x, weights.get("norm"), spec.norm_eps)
    rows = normed.detach()
    log_sum, drawn = _draw(spec, source, rows, seed)
    gradient = torch.zeros_like(rows)
    for first, head in _head_blocks(spec, source, len(rows)):
        p = (rows @ head.T - log_sum[:, None]).exp()
        inside = ((drawn >= first) & (drawn < first + len(head))).nonzero(as_tuple=True)[0]
        p[inside, drawn[inside] - first] -= 1
        gradient += p @ head
    (pulled,) = torch.autograd.grad(normed, x, gradient)
    return pulled


def _draw(spec: ModelSpec, source: Source, rows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the logits [T] and a token int64 [T] drawn from them (the largest logit plus Gumbel noise)."""
    generator = torch.Generator().manual_seed(seed)
    log_sum = torch.full((len(rows),), -torch.inf)
    best, drawn = log_sum.clone(), torch.zeros(len(rows), dtype=torch.int64)
    for first, head in _head_blocks(spec, source, len(rows)):
        logits = rows @ head.T
        log_sum = torch.logaddexp(log_sum, logits.logsumexp(-1))
        noise = torch.empty_like(logits).exponential_(generator=generator)
        value, at = (logits - noise.log()).max(-1)
        drawn, best = torch.where(value > best, at + first, drawn), torch.maximum(best, value)
    return log_sum, drawn


def _head_blocks(spec: ModelSpec, source: Source, rows: int):
    name = "embed" if spec.tied else "head"
    step = max(1, _HEAD_BYTES // 4 // max(spec.hidden_size, rows))
    for first in range(0, spec.vocab_size, step):
        yield first, torch.from_numpy(source.read(name, first, min(first + step, spec.vocab_size)))
