"""Times the INT4 kernels on the GPU at hand, after comparing them with the reference.

    python scripts/bench_kernels.py [--ptx 87]

The shape is MiMo-7B's, groups of 128. First the floor: the bandwidth of a copy, bytes read plus bytes written. Then
each kernel of a decode step at 1 and 4 rows, on weights that rotate past the caches, as share of the time that its
bytes take at that bandwidth; all products and norms of a step as one CUDA graph; the products of a long step; the
gated feed-forward at several shares of kept blocks beside the dense one. --ptx runs the code compiled for another
compute capability, as a newer GPU takes it. Reports nothing when a result is wrong. The last line is JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from _bench import median, refuse, report, spread
from bench_attention import Kernels

from mimo_edge.export.programs.tuning import Tuning, tuning
from mimo_edge.kernels.int4_linear import layout
from mimo_edge.kernels.int4_linear import variants as int4
from mimo_edge.kernels.launch import Launch
from mimo_edge.kernels.sparse_ffn import variants as sparse
from mimo_edge.spec import GateSpec, TensorQuant

LAYERS, HIDDEN, INTERMEDIATE, QKV, VOCAB, EPS = 36, 4096, 11008, 6144, 151680, 1e-6
QUANT, GATE = TensorQuant(4, 128), GateSpec(64, 128)
TOLERANCE, ROTATED = 3e-3, 400e6  # relative error; bytes of copies that no cache holds
Tensors = dict[str, torch.Tensor]


@dataclass
class Weights:
    """`copies` random matrices [n, k] in the layout of the kernels."""

    n: int
    k: int
    stacked: int = 1
    copies: int = 0

    def __post_init__(self) -> None:
        shapes = {p: shape for p, (_, shape) in layout.shapes(self.n, self.k, QUANT, self.stacked).items()}
        self.bytes = int(self.n * self.k * (0.5 + 3 / QUANT.group))
        self.copies = self.copies or max(2, -(-int(ROTATED) // self.bytes))
        q = torch.randint(-(2**31), 2**31, (self.copies, *shapes["q"]), device="cuda").int()
        scales = (torch.rand((self.copies, *shapes["scales"]), device="cuda") * 0.02 + 0.001).half()
        zeros = torch.randint(0, 16, (self.copies, *shapes["zeros"]), device="cuda", dtype=torch.uint8)
        self.parts = {"q": q, "scales": scales, "zeros": zeros}

    def at(self, i: int, name: str = "w") -> Tensors:
        return {f"{name}.{part}": values[i % self.copies] for part, values in self.parts.items()}

    def dense(self, i: int = 0) -> torch.Tensor:
        """The dequantised matrix [n, k], read by the layout's definition."""
        q, scales, zeros = (values[i] for values in self.parts.values())
        shifts = torch.tensor([4 * (v // 2) + 16 * (v % 2) for v in range(8)], device="cuda", dtype=torch.int32)
        levels = (q[..., None] >> shifts & 15).permute(0, 5, 3, 1, 4, 2, 6).reshape(-1, self.k).float()
        scales, zeros = (
            g.permute(0, 3, 2, 1).reshape(len(levels), -1).float().repeat_interleave(QUANT.group, 1)
            for g in (scales, zeros)
        )
        return levels.sub_(zeros).mul_(scales)[: self.n]


def check(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    error = float((got.float() - want).norm() / want.norm())
    if not error <= TOLERANCE:
        refuse(f"{what}: relative error {error:.2e}, at most {TOLERANCE}")


def nan(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def rmsnorm(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm


class Bench:
    """`floor` is bytes a microsecond."""

    def __init__(self, kernels: Kernels, tuned: Tuning):
        self.kernels, self.tuned = kernels, tuned
        self.results: dict[str, Any] = {}
        a = torch.empty(5 * 10**8, device="cuda")
        b = torch.empty_like(a)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mul(a, 2.0, out=b)
        times = []
        for _ in range(9):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000)
        self.floor = 8 * a.numel() / median(times)
        self.results["copy_gb_s"] = round(self.floor / 1000)
        print(f"floor: a copy moves {self.floor / 1000:.0f} GB/s (reads and writes)")

    def show(self, name: str, times: Sequence[float], launches: int, nbytes: float, more: str = "") -> float:
        us = median(times) / launches
        rate = f"{nbytes / us / 1e6:5.2f} TB/s, {nbytes / self.floor / us:4.0%} of the floor" if nbytes else ""
        print(f"{name:34} {us:9.2f} us ±{spread(times):.1%}  {rate}{more}", flush=True)
        self.results[name] = round(us, 2)
        return us

    def op(
        self, name: str, rows: int, w: Weights, make: Callable[[], Sequence[Launch]], io: Tensors, want: torch.Tensor
    ) -> None:
        """One product: right on three inputs, then timed over rotating copies."""
        launch = make()[-1]
        out = next(io[n] for n in ("y", "h") if n in io)
        self.kernels.run({**io, **w.at(0)}, launch)
        check(f"{name} at {rows} rows", out, want)
        work = [(launch, {**io, **w.at(i)}) for i in range(w.copies)]
        self.show(f"{name} rows={rows}", self.kernels.time(work), len(work), w.bytes)

    def decode(self, rows: int) -> None:
        def linear(n: int, k: int, **more: str) -> Callable[[], Sequence[Launch]]:
            cut = self.tuned.product("linear", n, k)
            names: dict[str, Any] = {"x": "x", "w": "w", "y": "y", **more}
            return lambda: int4.decode(rows, n, k, QUANT, tuned=cut, **names)

        for seed in range(3):
            torch.manual_seed(seed)
            x, r = torch.randn(rows, HIDDEN, device="cuda").half(), torch.randn(rows, HIDDEN, device="cuda")
            self._decode(rows, linear, x, r, timed=seed == 2)

    def _decode(self, rows: int, linear: Callable, x: torch.Tensor, r: torch.Tensor, timed: bool) -> None:
        residual = {"residual": "r", "out": "fp32"}
        cases = []
        w = Weights(QKV, HIDDEN, copies=0 if timed else 1)
        cases.append(("qkv", w, linear(QKV, HIDDEN), {"x": x, "y": nan(rows, QKV)}, x.float() @ w.dense().T))
        w = Weights(HIDDEN, HIDDEN, copies=0 if timed else 1)
        io = {"x": x, "r": r, "y": nan(rows, HIDDEN, dtype=torch.float32)}
        cases.append(("o", w, linear(HIDDEN, HIDDEN, **residual), io, x.float() @ w.dense().T + r))
        w = Weights(2 * INTERMEDIATE, HIDDEN, 2, 0 if timed else 1)
        gate, up = (x.float() @ w.dense().T).chunk(2, -1)
        cut = self.tuned.product("gate_up", INTERMEDIATE, HIDDEN)
        names = {"x": "x", "w": "w", "h": "h"}
        make = partial(int4.decode_gate_up, rows, INTERMEDIATE, HIDDEN, QUANT, tuned=cut, **names)
        cases.append(("gate_up", w, make, {"x": x, "h": nan(rows, INTERMEDIATE)}, F.silu(gate) * up))
        w = Weights(HIDDEN, INTERMEDIATE, copies=0 if timed else 1)
        h = torch.randn(rows, INTERMEDIATE, device="cuda").half()
        io = {"x": h, "r": r, "y": nan(rows, HIDDEN, dtype=torch.float32)}
        cases.append(("down", w, linear(HIDDEN, INTERMEDIATE, **residual), io, h.float() @ w.dense().T + r))
        w = Weights(VOCAB, HIDDEN, copies=2 if timed else 1)
        head = self.tuned.product("head", VOCAB, HIDDEN)
        parts = int4.head_programs(VOCAB, head)
        io = {"x": x, "y": nan(rows, VOCAB, dtype=torch.float32), "b": nan(rows, parts, dtype=torch.float32)}
        io["i"] = torch.zeros(rows, parts, dtype=torch.int32, device="cuda")
        names = {"x": "x", "w": "w", "y": "y", "best": "b", "best_index": "i"}
        make = partial(int4.decode_head, rows, VOCAB, HIDDEN, QUANT, tuned=head, **names)
        cases.append(("head", w, make, io, x.float() @ w.dense().T))
        for name, w, make, io, want in cases:
            if timed:
                self.op(name, rows, w, make, io, want)
            else:
                self.kernels.run({**io, **w.at(0)}, *make())
                check(f"{name} at {rows} rows", next(io[n] for n in ("y", "h") if n in io), want)
        best = torch.gather(cases[-1][3]["i"], 1, cases[-1][3]["b"].argmax(1, keepdim=True))[:, 0]
        if not torch.equal(best.long(), cases[-1][3]["y"].argmax(1)):
            refuse("head: its best token is not the largest logit")

    def step(self, rows: int) -> None:
        """All products and norms of a step, each layer with weights of its own, as one graph."""
        p = self.tuned.product
        sizes = {"qkv": (QKV, HIDDEN, 1), "o": (HIDDEN, HIDDEN, 1), "gu": (2 * INTERMEDIATE, HIDDEN, 2)}
        sizes["down"] = (HIDDEN, INTERMEDIATE, 1)
        weights = {n: Weights(*size, copies=LAYERS) for n, size in sizes.items()}
        head = Weights(VOCAB, HIDDEN, copies=1)
        cut = p("head", VOCAB, HIDDEN)
        t = {n: torch.randn(rows, k, device="cuda").half() for n, k in (("qkv", QKV), ("attended", HIDDEN))}
        t |= {"x": torch.randn(rows, HIDDEN, device="cuda"), "n": torch.ones(HIDDEN, device="cuda")}
        t |= {"normed": nan(rows, HIDDEN), "h": nan(rows, INTERMEDIATE), "l": nan(rows, VOCAB, dtype=torch.float32)}
        t["b"] = nan(rows, int4.head_programs(VOCAB, cut), dtype=torch.float32)
        t["i"] = torch.zeros_like(t["b"], dtype=torch.int32)
        norm = {"x": "x", "norm": "n", "normed": "normed", "eps": EPS}
        residual = {"y": "x", "residual": "x", "out": "fp32"}
        work = []
        for i in range(LAYERS):
            layer = t | {k: v for n, w in weights.items() for k, v in w.at(i, n).items()}
            launches = (
                *int4.decode(rows, QKV, HIDDEN, QUANT, w="qkv", y="qkv", tuned=p("linear", QKV, HIDDEN), **norm),
                *int4.decode(
                    rows, HIDDEN, HIDDEN, QUANT, x="attended", w="o", tuned=p("linear", HIDDEN, HIDDEN), **residual
                ),
                *int4.decode_gate_up(
                    rows, INTERMEDIATE, HIDDEN, QUANT, w="gu", h="h", tuned=p("gate_up", INTERMEDIATE, HIDDEN), **norm
                ),
                *int4.decode(
                    rows,
                    HIDDEN,
                    INTERMEDIATE,
                    QUANT,
                    x="h",
                    w="down",
                    tuned=p("linear", HIDDEN, INTERMEDIATE),
                    **residual,
                ),
            )
            work += [(x, layer) for x in launches]
        launches = int4.decode_head(
            rows, VOCAB, HIDDEN, QUANT, w="head", y="l", best="b", best_index="i", tuned=cut, **norm
        )
        work += [(x, t | head.at(0, "head")) for x in launches]
        nbytes = LAYERS * sum(w.bytes for w in weights.values()) + head.bytes
        us = self.show(f"step rows={rows}", self.kernels.time(work), 1, nbytes)
        print(f"{'':34} {1e6 / us:.0f} steps/s, attention not counted")

    def prefill(self, rows: int) -> None:
        cut, total = self.tuned.many(rows), 0.0
        x = torch.randn(rows, HIDDEN, device="cuda").half()
        r = torch.randn(rows, HIDDEN, device="cuda")
        for name, n, k in (("qkv", QKV, HIDDEN), ("o", HIDDEN, HIDDEN), ("down", HIDDEN, INTERMEDIATE)):
            w, x = Weights(n, k, copies=4), torch.randn(rows, k, device="cuda").half()
            more: dict[str, Any] = {} if name == "qkv" else {"residual": "r", "out": "fp32"}
            launch = int4.prefill(rows, n, k, QUANT, x="x", w="w", y="y", tuned=cut, **more)[-1]
            io = {"x": x, "r": r, "y": nan(rows, n, dtype=torch.float32 if more else torch.float16)}
            total += self._long(name, rows, w, launch, io, io["y"], x.float() @ w.dense().T + (r if more else 0))
        w, x = Weights(2 * INTERMEDIATE, HIDDEN, 2, 4), torch.randn(rows, HIDDEN, device="cuda").half()
        launch = int4.prefill_gate_up(rows, INTERMEDIATE, HIDDEN, QUANT, x="x", w="w", h="h", tuned=cut)[-1]
        io, (gate, up) = {"x": x, "h": nan(rows, INTERMEDIATE)}, (x.float() @ w.dense().T).chunk(2, -1)
        total += self._long("gate_up", rows, w, launch, io, io["h"], F.silu(gate) * up)
        print(f"{'products of a step, rows=' + str(rows):34} {rows / LAYERS / total * 1e6:.0f} tokens/s")
        self.results[f"prefill tokens/s rows={rows}"] = round(rows / LAYERS / total * 1e6)

    def _long(
        self, name: str, rows: int, w: Weights, launch: Launch, io: Tensors, out: torch.Tensor, want: torch.Tensor
    ) -> float:
        self.kernels.run({**io, **w.at(0)}, launch)
        check(f"{name} at {rows} rows", out, want)
        times = self.kernels.time([(launch, {**io, **w.at(i)}) for i in range(w.copies)])
        rate = 2 * rows * w.n * w.k / (median(times) / w.copies) / 1e6
        return self.show(f"{name} rows={rows}", times, w.copies, 0, f"{rate:5.0f} TFLOP/s")

    def gated(self, rows: int) -> None:
        """The feed-forward, norm and gate included, at several shares of kept blocks."""
        blocks = INTERMEDIATE // GATE.block
        up, down = Weights(2 * INTERMEDIATE, HIDDEN, 2), Weights(HIDDEN, INTERMEDIATE, copies=10)
        t = {n: torch.randn(rows, HIDDEN, device="cuda") for n in ("x", "r")}
        t["x"] = t["x"][:1] + 0.02 * t["x"]
        t |= {"norm": torch.rand(HIDDEN, device="cuda") + 0.5, "w1": torch.randn(GATE.rank, HIDDEN, device="cuda") / 64}
        t |= {"w2": torch.randn(blocks, GATE.rank, device="cuda")}
        t |= {
            "normed": nan(rows, HIDDEN),
            "ranks": nan(rows, GATE.rank, dtype=torch.float32),
            "h": nan(rows, INTERMEDIATE),
        }
        t |= {"y": nan(rows, HIDDEN, dtype=torch.float32)}
        t["keep"] = torch.zeros(rows, blocks, device="cuda", dtype=torch.uint8)
        listed = self.tuned.product("down_listed", HIDDEN, INTERMEDIATE)
        t["listed"] = torch.zeros(sparse.listed_size(INTERMEDIATE, GATE.block, listed), device="cuda").int()
        scores = torch.relu(rmsnorm(t["x"], t["norm"]) @ t["w1"].T) @ t["w2"].T
        p, names = self.tuned.product, {n: n for n in t if n != "r"} | {"bias": "bias"}
        cuts = {"tuned_gate_up": p("gate_up_listed", INTERMEDIATE, HIDDEN), "tuned_down": listed}
        launches = sparse.decode_sparse(
            rows, INTERMEDIATE, HIDDEN, QUANT, GATE, eps=EPS, gate_up="u", down="d", residual="r", **names, **cuts
        )
        cut, behind = p("gate_up", INTERMEDIATE, HIDDEN), p("linear", HIDDEN, INTERMEDIATE)
        into = {"x": "x", "norm": "norm", "normed": "normed", "eps": EPS, "w": "u", "h": "h", "tuned": cut}
        out = {"x": "h", "w": "d", "y": "y", "residual": "r", "out": "fp32", "tuned": behind}
        dense = [
            *int4.decode_gate_up(rows, INTERMEDIATE, HIDDEN, QUANT, **into),
            *int4.decode(rows, HIDDEN, INTERMEDIATE, QUANT, **out),
        ]
        wu, wd = up.dense(), down.dense()
        at = [t | up.at(i, "u") | down.at(i, "d") for i in range(up.copies)]
        whole = self.show(
            f"dense feed-forward rows={rows}", self.kernels.time([(x, a) for a in at for x in dense]), len(at), 0
        )
        for share in (0.25, 0.5, 1.0):
            offset = 1e6 if share == 1 else 0.0
            bias = (offset - torch.quantile(scores[:1], 1 - share, dim=1)).expand(blocks).contiguous()
            self.kernels.run(at[0] | {"bias": bias}, *launches)
            gate, value = (t["normed"].float() @ wu.T).chunk(2, -1)
            kept = t["keep"].float().repeat_interleave(GATE.block, 1)
            check(f"gated feed-forward, {share:.0%}", t["y"], (F.silu(gate) * value * kept) @ wd.T + t["r"])
            if ((scores + bias > 0) != (t["keep"] > 0)).float().mean() > 0.01:
                refuse("the gate keeps other blocks than the reference")
            times = self.kernels.time([(x, a | {"bias": bias}) for a in at for x in launches])
            us = self.show(f"gated, {share:.0%} of blocks, rows={rows}", times, len(at), 0)
            print(f"{'':34} {us / whole:.2f} of dense")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ptx", type=int, help="run PTX compiled for this compute capability, such as 87")
    args = parser.parse_args()
    torch.zeros(1, device="cuda")
    kernels = Kernels(args.ptx)
    bench = Bench(kernels, tuning(f"sm_{args.ptx or kernels.driver.capability}"))
    for rows in (1, 4):
        bench.decode(rows)
        bench.step(rows)
    for rows in (16, 128, 512):
        bench.prefill(rows)
    for rows in (1, 4):
        bench.gated(rows)
    report(bench.results | {"gpu": torch.cuda.get_device_name(), "code": f"sm_{args.ptx or kernels.driver.capability}"})


if __name__ == "__main__":
    main()
