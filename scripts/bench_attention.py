"""Times WindowedAttention's kernels on the GPU at hand, after comparing them with the reference.

    python scripts/bench_attention.py [--ptx 87]

The shape is MiMo-7B's: 36 layers, 32 query and 8 kv heads of 128, once with full attention and once with a window.
A decode step's launches, one a layer, each with pools of its own so that no cache helps, are one CUDA graph. Reports
nothing when a result is wrong. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _bench import median, refuse, report, spread

from mimo_edge.backends import oracle
from mimo_edge.backends.cuda_driver import CTYPES, Driver
from mimo_edge.kernels import aot
from mimo_edge.kernels.index import KernelEntry
from mimo_edge.kernels.launch import Buffer, Launch
from mimo_edge.kernels.windowed_attention import variants
from mimo_edge.kernels.windowed_attention.reference import Shape, windowed_attention
from mimo_edge.kernels.windowed_attention.variants import DEFAULT, Pool, Tuning
from mimo_edge.spec import AttentionSpec

LAYERS, PAGE, EPS = 36, 64, 1e-6
FULL = AttentionSpec(32, 8, 128, 128, 128, 1e4, 128**-0.5)
SPECS = {
    "full": FULL,
    "window": replace(FULL, window=1024),
    "Gemma 3 270M": AttentionSpec(4, 1, 256, 256, 256, 1e6, 256**-0.5, window=512, qk_norm=True),
    "MiMo-V2": AttentionSpec(64, 8, 192, 128, 64, 5e6, 192**-0.5, window=128, value_scale=0.707, sinks=True),
    "MiMo-V2 full": AttentionSpec(64, 4, 192, 128, 64, 5e6, 192**-0.5, value_scale=0.707, sinks=True),
}
CONTEXTS = (1024, 4096, 16384, 32768)
DEVICE = "cuda"
TOLERANCE = 5e-3
DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "i32": torch.int32, "u8": torch.uint8}


class Kernels:
    """Compiles launches ahead of time, as an export does, and runs them on tensors by name."""

    def __init__(self, ptx: int | None):
        self.driver = Driver()
        self.ptx = ptx
        self._functions: dict[str, tuple[Any, KernelEntry]] = {}

    def compile(self, launches: Sequence[Launch]) -> None:
        wanted = [x.variant for x in launches if x.variant.key not in self._functions]
        with tempfile.TemporaryDirectory() as folder:
            index = aot.compile_variants(wanted, self.ptx or self.driver.capability, Path(folder))
            for key, entry in index.kernels.items():
                code = (Path(folder) / f"{key}.{'ptx' if self.ptx else 'cubin'}").read_bytes()
                function = self.driver.function(self.driver.load(code), entry.entry, entry.shared)
                self._functions[key] = (function, entry)

    def queue(self, launch: Launch, tensors: dict[str, torch.Tensor]) -> None:
        function, entry = self._functions[launch.variant.key]
        values: list[Any] = [
            ctypes.c_uint64(tensors[x].data_ptr()) if isinstance(x, str) else CTYPES[launch.variant.types[n]](x)
            for n, x in launch.args.items()
        ]
        values += [ctypes.c_uint64(0)] * entry.scratch
        self.driver.launch(function, launch.grid, 32 * entry.num_warps, entry.shared, values, entry.overlap)

    def run(self, tensors: dict[str, torch.Tensor], *launches: Launch) -> None:
        torch.cuda.synchronize()
        self.compile(launches)
        for launch in launches:
            self.queue(launch, tensors)
        self.driver.sync()

    def time(self, work: Sequence[tuple[Launch, dict[str, torch.Tensor]]], tries: int = 15) -> list[float]:
        """Microseconds that replays of the launches as one graph take."""
        torch.cuda.synchronize()
        self.compile([x for x, _ in work])

        def queue() -> None:
            for launch, tensors in work:
                self.queue(launch, tensors)

        graph = self.driver.capture(queue)
        times: list[float] = []
        self.driver.replay(graph)
        for _ in range(tries):
            with self.driver.timed(times):
                self.driver.replay(graph)
        self.driver.drop(graph)
        return [1000 * t for t in times]


class Layer:
    """One layer's buffers on the GPU, with NaN wherever nothing was written."""

    def __init__(self, a: AttentionSpec, context: int, seed: int, tuned: Tuning = DEFAULT):
        self.a, self.tuned, self.g = a, tuned, torch.Generator().manual_seed(seed)
        self.pool = Pool(1, -(-context // PAGE), PAGE) if a.window is None else Pool(1, 1, a.window + 3)
        table = torch.randperm(self.pool.blocks, generator=self.g).int()[None]
        tensors = {"table": table, "frequencies": oracle.rope_frequencies(a).float(), "sinks": self.random(a.heads)}
        tensors |= {n: 1 + 0.1 * self.random(a.head_dim) for n in ("q_norm", "k_norm")}
        for name, d in (("k_pool", a.head_dim), ("v_pool", a.v_head_dim)):
            shape = (self.pool.blocks, self.pool.block, a.kv_heads, d)
            tensors[name] = torch.full(shape, torch.nan, dtype=torch.float16, device=DEVICE)
        self.t = {n: x.contiguous().to(DEVICE) for n, x in tensors.items()}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.g)

    def step(self, rows: int, length: int) -> list[Launch]:
        """Inputs of `rows` rows behind `length` committed ones, and the launches of a step."""
        a, t = self.a, self.t
        t["qkv"] = self.random(rows, a.q_rows + a.k_rows + a.v_rows).half().to(DEVICE)
        t["positions"] = torch.arange(length, length + rows, dtype=torch.int32).to(DEVICE)
        t["sequences"], t["lengths"] = torch.zeros(rows).int().to(DEVICE), torch.tensor([length]).int().to(DEVICE)
        t["counts"], t["y"] = (
            torch.tensor([rows]).int().to(DEVICE),
            torch.full((rows, a.heads * a.v_head_dim), torch.nan).half().to(DEVICE),
        )
        decode = rows <= variants.MOST_DECODE_ROWS
        scratch = {"rotation": variants.rotation_buffer(rows, a)}
        scratch |= (
            variants.decode_scratch(rows, a, self.pool, self.tuned) if decode else variants.prefill_scratch(rows, a)
        )
        t |= {name: allocate(b) for name, b in scratch.items()}
        names = ["qkv", "k_pool", "v_pool", "positions", "sequences", "lengths", "table", "y", *scratch]
        names += ["sinks"] * a.sinks + ["q_norm", "k_norm"] * a.qk_norm
        given = {n: n for n in names}
        launches = [variants.rotation(rows, a, positions="positions", frequencies="frequencies", out="rotation")]
        if decode:
            return [*launches, variants.decode(rows, a, self.pool, EPS, **given, tuned=self.tuned)]
        launches += variants.prefill(rows, a, self.pool, EPS, **given, tuned=self.tuned)
        if a.window is not None:
            names = ["k_new", "v_new", "k_pool", "v_pool", "positions", "sequences", "lengths", "counts", "table"]
            launches.append(variants.commit(rows, a, self.pool, **{n: n for n in names}))
        return launches

    def reference(self) -> list[torch.Tensor]:
        a = self.a
        t = {n: x.cpu() for n, x in self.t.items()}
        shape = Shape(a.heads, a.kv_heads, a.head_dim, a.v_head_dim, a.window or 0, a.scale, a.value_scale, EPS)
        rest = [t[n] for n in ("k_pool", "v_pool", "positions", "sequences", "lengths", "table", "frequencies")]
        norms = [t["q_norm"], t["k_norm"]] if a.qk_norm else [None, None]
        return list(windowed_attention(shape, t["qkv"].float(), *rest, t["sinks"] if a.sinks else None, *norms))


def allocate(b: Buffer) -> torch.Tensor:
    tensor = torch.empty(b.shape, dtype=DTYPES[b.dtype], device=DEVICE)
    tensor.view(torch.uint8).fill_(255 if b.fill is None else b.fill)
    return tensor


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    held = ~b.isnan()
    return float((a.cpu().float() - b)[held].norm() / b[held].float().norm())


def check(kernels: Kernels, name: str, seed: int, tuned: Tuning = DEFAULT) -> float:
    """The largest relative error of a prompt in two chunks, one row, four rows and a step behind two rejected ones."""
    layer, worst = Layer(SPECS[name], 2048, seed, tuned), 0.0
    for rows, length in ((512, 0), (512, 512), (512, 1024), (1, 1536), (4, 1537), (4, 1539)):
        launches = layer.step(rows, length)
        y, k, v = layer.reference()
        kernels.run(layer.t, *launches)
        errors = [error(layer.t["y"], y), error(layer.t["k_pool"], k.float()), error(layer.t["v_pool"], v.float())]
        worst = max(worst, *errors) if all(e == e for e in errors) else float("nan")
        if not worst < TOLERANCE:
            refuse(f"{name}, seed {seed}: {rows} rows behind {length} are off by {errors}")
    return worst


def decode_times(
    kernels: Kernels, name: str, rows: int, context: int, layers: list[Layer], tuned: Tuning
) -> list[float]:
    """Microseconds a layer."""
    work = []
    for layer in layers:
        layer.tuned = tuned
        rotate, attend = layer.step(rows, context - rows)
        kernels.run(layer.t, rotate)
        work.append((attend, dict(layer.t)))
    return [t / len(work) for t in kernels.time(work)]


def filled(name: str) -> list[Layer]:
    layers = [Layer(SPECS[name], max(CONTEXTS), seed) for seed in range(LAYERS)]
    for layer in layers:
        layer.t["k_pool"].normal_(), layer.t["v_pool"].normal_()
    return layers


def prefill_times(kernels: Kernels, name: str, rows: int, tokens: int, tuned: Tuning) -> list[float]:
    """Microseconds a layer for a prompt in chunks of `rows`."""
    work = []
    layer = Layer(SPECS[name], tokens, 0, tuned)
    for length in range(0, tokens, rows):
        launches = layer.step(rows, length)
        work += [(x, dict(layer.t)) for x in launches]
    return kernels.time(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ptx", type=int, help="run the PTX of this compute capability, 87 say")
    kernels = Kernels(parser.parse_args().ptx)
    worst = {name: max(check(kernels, name, seed) for seed in (1, 2, 3)) for name in SPECS}
    for name, value in worst.items():
        print(f"{name}: relative error at most {value:.1e}")
    results: dict[str, object] = {"device": kernels.driver.name, "ptx": kernels.ptx, "errors": worst}
    print(f"\n{'layer':8}{'rows':>5}{'context':>9}{'us a layer':>12}{'spread':>8}{'GB/s':>8}")
    for name in ("full", "window"):
        layers = filled(name)
        for rows in (1, 4):
            for context in CONTEXTS:
                times = decode_times(kernels, name, rows, context, layers, DEFAULT)
                a = SPECS[name]
                speed = 2 * a.kv_elements * min(context, a.window or context) / median(times) / 1e3
                print(f"{name:8}{rows:5}{context:9}{median(times):12.2f}{spread(times):8.1%}{speed:8.0f}")
                results[f"decode {name} {rows} {context}"] = median(times)
        del layers
        times = prefill_times(kernels, name, 512, 2048, DEFAULT)
        print(f"{name:8} prefill of 2048 tokens in chunks of 512: {median(times):.0f} us a layer ({spread(times):.1%})")
        results[f"prefill {name}"] = median(times)
    report(results)


if __name__ == "__main__":
    main()
