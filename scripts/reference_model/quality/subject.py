"""The model under measurement: one compiled graph through which one set of weights after another goes.

Products take float16 activations and weights and add in float32 beside a float32 residual stream, as on a GPU at run
time; float32 throughout on a CPU. Rounding a dequantised INT4 weight to float16 changes it by 1/2,000 at most, a
hundredth of a step between neighbouring levels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from mimo_edge.spec import ModelSpec
from scripts.reference_model.attention import Masks
from scripts.reference_model.gates import BlockGate
from scripts.reference_model.losses import to_batch
from scripts.reference_model.model import Model
from scripts.reference_model.packing import ACTION, GENERAL, PROMPT, REPLY, Rows

SORTS = ("prompt", "answer", "general")
BIASES = {".o.bias": "o_bias", ".down.bias": "down_bias"}  # canonical endings: names in Block
STRIDE = 64  # every so many rows' gate values are kept, to place thresholds


class GateReading(NamedTuple):
    """What MeasuringGate takes where training has GateUse. dense bool [B]: keep every block; sorts float [3, B, S], one
    for each of SORTS; together float [2, B, S]: a row and its last one, or three, predecessors are in one document.
    Without `sorts` nothing is counted."""

    dense: Tensor
    sorts: Tensor | None = None
    together: Tensor | None = None


class MeasuringGate(nn.Module):
    """BlockGate's decision. forward -> (0/1 mask [B, S, blocks], (counts [3, 6], values [B, S / STRIDE, blocks])).

    Counts for each of SORTS: sums over rows of the share of blocks kept, of the union with the row before, of the union
    with the three rows before, each followed by the number of rows."""

    def __init__(self, gate: BlockGate):
        super().__init__()
        self.w1, self.w2, self.bias = gate.w1, gate.w2, gate.bias

    def forward(self, x: Tensor, use: GateReading) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        with torch.autocast(x.device.type, enabled=False):  # the sign decides: float32, as at run time
            z = F.relu(x.float() @ self.w1.T) @ self.w2.T + self.bias
        keep = z > 0
        mask = (keep | use.dense[:, None, None]).float()
        if use.sorts is None or use.together is None:
            return mask, None
        pair = keep[:, 1:] | keep[:, :-1]
        four = pair[:, 2:] | pair[:, :-2]
        shares = torch.stack([F.pad(k.float().mean(-1), (z.shape[1] - k.shape[1], 0)) for k in (keep, pair, four)])
        rows = use.sorts[:, None] * torch.cat([torch.ones_like(use.together[:1]), use.together])  # [3 sorts, 3, B, S]
        counts = torch.stack([(rows * shares).sum((2, 3)), rows.sum((2, 3))], dim=-1).flatten(1)
        return mask, (counts, z[:, ::STRIDE])


@dataclass(frozen=True)
class Pass:
    """best int16 [1 + heads, R, S]: most likely tokens of the main model and the heads; nll float32 [R, S] of the main
    model; counts float64 [layers, 3, 6] as MeasuringGate's; values float32 [layers, n, blocks] of sampled rows."""

    best: NDArray[np.int16]
    nll: NDArray[np.float32]
    counts: NDArray[np.float64]
    values: NDArray[np.float32]


class Subject:
    """load() weights, shift() thresholds, run() rows."""

    def __init__(self, spec: ModelSpec, device: torch.device, batch: int, length: int, compiled: bool = True):
        """`compiled` pays with half a dozen passes or more, and at 8,192 tokens a row; on a CPU nothing is compiled."""
        self.spec, self.device, self.batch, self.length = spec, device, batch, length
        self.heads = spec.mtp.heads if spec.mtp else 0
        self.model = Model(spec).to(device).requires_grad_(False)
        self.model.tables = {kind: t.to(device) for kind, t in self.model.tables.items()}
        for layer in self.model.layers:
            layer.gate = MeasuringGate(layer.gate)
        self._blocks = [*self.model.layers, *(head.layer for head in self.model.mtp)]
        for block in self._blocks:
            for name in BIASES.values():
                zero = torch.zeros(spec.hidden_size, device=device)
                setattr(block, name, nn.Parameter(zero, requires_grad=False))
        self._biases: list[Tensor] = []
        self._masks = Masks(spec, batch, length, device, explicit=not compiled)
        if device.type == "cuda" and compiled:
            torch._dynamo.config.cache_size_limit = 64
            for block in self._blocks:
                block.compile(dynamic=False)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Canonical parameters; biases that there are none of are 0."""
        missing = {n: torch.zeros_like(p) for n, p in self.model.named_parameters() if n.endswith("_bias")}
        self.model.load_state_dict(missing | {_own_name(name): value for name, value in weights.items()})
        self._biases = [layer.gate.bias.clone() for layer in self.model.layers]

    def shift(self, by: Sequence[float]) -> None:
        """Adds by[i] to every threshold of layer i as loaded: that much more a block must score to be kept."""
        for layer, bias, x in zip(self.model.layers, self._biases, by, strict=True):
            layer.gate.bias.copy_(bias - x)

    def share_first_head(self) -> None:
        """All positions are drafted with the first head's weights, until the next load()."""
        for head in self.model.mtp[1:]:
            head.load_state_dict(self.model.mtp[0].state_dict())

    def autocast(self) -> contextlib.AbstractContextManager:
        gpu = self.device.type == "cuda"
        return torch.autocast("cuda", torch.float16) if gpu else contextlib.nullcontext()

    @torch.no_grad()
    def hidden(self, rows: Rows, dense: bool) -> tuple[list[Tensor], list, Tensor]:
        """(normed hidden states [B, S, hidden] of the main model and the heads, gate statistics, tokens [B, S + 4])
        of exactly `batch` rows."""
        batch = to_batch(rows, self.heads, self.device)
        self._masks.set(batch.document)
        kinds = torch.from_numpy(rows.kinds[:, : self.length].astype(np.int64)).to(self.device)
        real = batch.tokens[:, : self.length] != 0
        sorts = [kinds == PROMPT, (kinds == ACTION) | (kinds == REPLY), kinds == GENERAL]
        same = [F.pad(batch.document[:, n:] == batch.document[:, :-n], (n, 0)) for n in (1, 3)]
        off = torch.full((self.batch,), dense, device=self.device)
        use = GateReading(off, torch.stack([s & real for s in sorts]).float(), torch.stack(same).float())
        with self.autocast():
            hidden, stats = self.model.hidden(batch.tokens, batch.position, self._masks.held, use)
        return hidden, stats, batch.tokens

    @torch.no_grad()
    def run(self, rows: Rows, dense: bool) -> Pass:
        """Any number of rows; the last batch is filled up with rows of padding."""
        best, nll, counts, values = [], [], [], []
        for at in range(0, len(rows.tokens), self.batch):
            hidden, stats, tokens = self.hidden(padded(rows, at, self.batch), dense)
            main, losses = zip(*(self._score(h, t) for h, t in zip(hidden[0], tokens, strict=True)), strict=True)
            drafts = [torch.stack([self.logits(row).argmax(-1) for row in h]) for h in hidden[1:]]
            best.append(torch.stack([torch.stack(main), *drafts]).to(torch.int16).cpu())
            nll.append(torch.stack(losses).cpu())
            counts.append(torch.stack([c for c, _ in stats]).double().cpu())
            values.append(torch.stack([z for _, z in stats]).flatten(1, 2).half().cpu())
        total = len(rows.tokens)
        return Pass(
            torch.cat(best, 1).numpy()[:, :total],
            torch.cat(nll).numpy()[:total],
            torch.stack(counts).sum(0).numpy(),
            torch.cat(values, 1).float().numpy(),
        )

    def logits(self, x: Tensor) -> Tensor:
        """float32 [..., vocab]."""
        with self.autocast():
            return F.linear(x, self.model.embed).float()

    def _score(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(hidden)
        return logits.argmax(-1), F.cross_entropy(logits, tokens[1 : 1 + self.length], reduction="none")


def _own_name(name: str) -> str:
    return next((f"{name.removesuffix(end)}.{own}" for end, own in BIASES.items() if name.endswith(end)), name)


def padded(rows: Rows, at: int, count: int) -> Rows:
    """Rows at, at + 1, ...; behind the last one, rows of padding."""
    parts = (x[at : at + count] for x in (rows.tokens, rows.document, rows.kinds, rows.position))
    return Rows(*(np.pad(x, ((0, count - len(x)), (0, 0))) for x in parts))
