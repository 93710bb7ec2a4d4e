"""What memory and arithmetic allow a model on a device: bytes and operations of a step, predictions, a roofline plot.

A decode step reads every weight once and the keys and values that its row sees; nothing can be quicker than those bytes
over the memory's bandwidth. A prompt's rows share the weights, so there arithmetic may be the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mimo_edge.device import modules
from mimo_edge.params import Param, parameters, stored
from mimo_edge.spec import ModelSpec


@dataclass(frozen=True)
class Device:
    """Bytes a second of memory, and dense float16 operations a second of the matrix units."""

    name: str
    bandwidth: float
    flops: float


MODULES = {m.name: Device(m.name, m.bandwidth, m.flops) for m in modules.MODULES.values()}
# Share of the bandwidth that good INT4 decoders reach on Orin: 0.70 (TinyChat, AGX) to 0.84 (MLC, Nano Super).
REACHED = (0.70, 0.84)


@dataclass(frozen=True)
class Step:
    """Bytes moved and operations done by a step of `rows` rows behind `context` committed ones."""

    rows: int
    context: int
    weight_bytes: int
    kv_bytes: int
    flops: float

    @property
    def nbytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def floor_s(self, device: Device) -> float:
        """Seconds that the device's memory and arithmetic need at the least."""
        return max(self.nbytes / device.bandwidth, self.flops / device.flops)


def step(spec: ModelSpec, rows: int, context: int, element_bytes: int = 2, logit_rows: int | None = None) -> Step:
    """`element_bytes` of a cached key or value: 2 on a GPU, 4 on a CPU. `logit_rows` None: logits of all rows."""
    last = rows if logit_rows is None else logit_rows
    main = [p for p in parameters(spec) if not p.name.startswith("mtp.")]
    weights, products = 0, 0.0
    for p in main:
        if p.name == "embed":
            weights += rows * _bytes(spec, p) // p.shape[0]
        if p.name != "embed" or not spec.separate_head:
            share = _chosen(spec, p)
            weights += int(min(1.0, rows * share) * _bytes(spec, p))
            many = last if p.kind in ("embedding", "head") else rows * share
            products += many * math.prod(p.shape) if len(p.shape) > 1 else 0
    kv, scores = 0, 0.0
    for i in range(len(spec.layers)):
        a = spec.attention_of(i)
        seen = context if a.window is None else min(context, a.window - 1)
        kv += element_bytes * a.kv_elements * (seen + rows)
        each = seen + rows / 2 if a.window is None else min(a.window, context + rows / 2)
        scores += a.heads * (a.head_dim + a.v_head_dim) * rows * each
    return Step(rows, context, weights, kv, 2.0 * (products + scores))


def predict(spec: ModelSpec, module: str, context: int) -> dict[str, Any]:
    """Tokens a second on a module that nobody measured here: the floor, and the range that `REACHED` of it gives.

    Raises BadInputError on an unknown module.
    """
    device = MODULES[modules.module(module).name]
    one = step(spec, 1, context)
    prompt = step(spec, 512, 0, logit_rows=1)
    low, high = REACHED
    floor = 1 / one.floor_s(device)
    return {
        "kind": "prediction, not a measurement",
        "module": module,
        "bandwidth_gb_s": device.bandwidth / 1e9,
        "float16_tflops": device.flops / 1e12,
        "context": context,
        "bytes_per_token": one.nbytes,
        "decode_tok_s_floor": floor,
        "decode_tok_s": [low * floor, high * floor],
        "prefill_512_tok_s_floor": 512 / prompt.floor_s(device),
    }


def _chosen(spec: ModelSpec, p: Param) -> float:
    """How often a row goes through a parameter: the share of experts that are chosen, 1 for everything else."""
    moe = spec.ffn_of(int(p.name.split(".")[1])).moe if ".experts." in p.name else None
    return moe.top_k / moe.experts if moe else 1.0


def _bytes(spec: ModelSpec, p: Param) -> int:
    return sum(t.nbytes for t in stored(p, spec.quant.of(p.kind)))


@dataclass(frozen=True)
class Point:
    """A measured step: seconds that it took."""

    name: str
    step: Step
    seconds: float


def plot(device: Device, points: list[Point]) -> str:
    """The roofline as SVG: operations a byte across, operations a second up, both logarithmic."""
    left, right = 0.1, 10_000.0
    top = 10 ** math.ceil(math.log10(device.flops))
    bottom = 10 ** math.floor(math.log10(min([left * device.bandwidth, *(p.step.flops / p.seconds for p in points)])))

    def x(intensity: float) -> float:
        return 70 + 640 * math.log10(intensity / left) / math.log10(right / left)

    def y(rate: float) -> float:
        return 420 - 380 * math.log10(rate / bottom) / math.log10(top / bottom)

    about = f"{device.bandwidth / 1e9:,.0f} GB/s, {device.flops / 1e12:,.1f} Tflop/s"
    ridge = device.flops / device.bandwidth
    roof = [(left, left * device.bandwidth), (ridge, device.flops), (right, device.flops)]
    line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in roof)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="470" font-family="sans-serif" font-size="12">',
        '<rect width="760" height="470" fill="white"/>',
        f'<text x="70" y="24">{device.name}: {about}</text>',
        f'<polyline points="{line}" fill="none" stroke="black" stroke-width="2"/>',
        '<text x="390" y="460" text-anchor="middle">operations a byte</text>',
        '<text x="16" y="230" text-anchor="middle" transform="rotate(-90 16 230)">operations a second</text>',
    ]
    parts += [_tick(x(10.0**e), 436, f"{10.0**e:g}") for e in range(-1, 5)]
    decades = range(round(math.log10(bottom)), round(math.log10(top)) + 1)
    parts += [_tick(46, y(10.0**e) + 4, f"1e{e}") for e in decades]
    for p in points:
        at_x, at_y = x(p.step.flops / p.step.nbytes), y(p.step.flops / p.seconds)
        share = p.step.floor_s(device) / p.seconds
        parts.append(f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="4" fill="crimson"/>')
        parts.append(f'<text x="{at_x + 8:.1f}" y="{at_y + 12:.1f}">{p.name}: {share:.0%} of the roof</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _tick(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" fill="gray">{text}</text>'
