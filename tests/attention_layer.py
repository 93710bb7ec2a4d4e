"""One attention layer's buffers for tests of its kernels, and what the reference makes of them."""

from dataclasses import dataclass, field

import torch
from launching import allocate, run

from mimo_edge.backends import oracle
from mimo_edge.kernels.windowed_attention import variants
from mimo_edge.kernels.windowed_attention.reference import Shape, windowed_attention
from mimo_edge.kernels.windowed_attention.variants import Pool, Tuning
from mimo_edge.spec import AttentionSpec

EPS = 1e-6
PAGES = 9
SMALL = Tuning(keys=16, prefill_keys=32, prefill_queries=32)  # several tiles also of short sequences

SPECS = {
    "full": AttentionSpec(4, 2, 16, 16, 16, 1e4, 0.25),
    "odd-sizes": AttentionSpec(9, 3, 10, 6, 4, 1e4, 0.3, value_scale=0.7),
    "window": AttentionSpec(4, 2, 20, 12, 8, 1e4, 0.3, window=21, sinks=True),
    "window-of-one": AttentionSpec(2, 2, 8, 8, 8, 1e4, 0.5, window=1, sinks=True),
    "norms": AttentionSpec(3, 1, 24, 24, 24, 1e6, 1.0, window=7, qk_norm=True),
    "no-rotation": AttentionSpec(4, 1, 16, 8, 0, 1e4, 0.5, sinks=True),
    "mimo-v2": AttentionSpec(16, 2, 192, 128, 64, 5e6, 192**-0.5, window=30, value_scale=0.7, sinks=True),
}


@dataclass
class Layer:
    """Every slot of its pools holds NaN until it is written. Each step is checked against the reference."""

    a: AttentionSpec
    sequences: int = 1
    block: int = 16
    seed: int = 0
    tuned: Tuning = SMALL
    held: list[int] | None = None  # the first committed position that counts, of each sequence
    pool: Pool = field(init=False)
    t: dict[str, torch.Tensor] = field(init=False)  # buffers by name

    def __post_init__(self):
        a, b = self.a, self.sequences
        self.g = torch.Generator().manual_seed(self.seed)
        self.pool = Pool(b, PAGES, self.block) if a.window is None else Pool(b, 1, a.window + 3)
        blocks = b * self.pool.blocks + 2
        table = torch.randperm(blocks, generator=self.g)[: b * self.pool.blocks].reshape(b, -1).int()
        self.t = {"table": table.contiguous(), "frequencies": oracle.rope_frequencies(a).float().contiguous()}
        for name, d in (("k_pool", a.head_dim), ("v_pool", a.v_head_dim)):
            self.t[name] = torch.full((blocks, self.pool.block, a.kv_heads, d), torch.nan).half()
        self.t |= {"sinks": self.random(a.heads)}
        self.t |= {name: 1 + 0.3 * self.random(a.head_dim) for name in ("q_norm", "k_norm")}

    def random(self, *shape):
        return torch.randn(shape, generator=self.g)

    def rows(self, n):
        return self.random(n, self.a.q_rows + self.a.k_rows + self.a.v_rows).half()

    def fill(self, lengths):
        """Random committed rows: those that the next query sees, and nothing else."""
        for s, n in enumerate(lengths):
            p = torch.arange(0 if self.a.window is None else max(0, n - self.a.window + 1), n)
            slots = self.t["table"][s].long()[p // self.pool.block % self.pool.blocks] * self.pool.block
            for name in ("k_pool", "v_pool"):
                flat = self.t[name].flatten(0, 1)
                flat[slots + p % self.pool.block] = self.random(len(p), *flat.shape[1:]).half()

    def decode(self, qkv, positions, sequences, lengths):
        """One step, checked; returns y."""
        want = self._given(qkv, positions, sequences, lengths)
        scratch = variants.decode_scratch(len(qkv), self.a, self.pool, self.tuned)
        self.t |= allocate(scratch)
        names = self._names(*scratch)
        run(self.t, variants.decode(len(qkv), self.a, self.pool, EPS, **names, held=bool(self.held), tuned=self.tuned))
        assert not self.t["counters"].any()
        return self._check(*want)

    def prefill(self, qkv, positions, sequences, lengths):
        """One step whose rows are all accepted, checked; returns y."""
        want = self._given(qkv, positions, sequences, lengths)
        before = self.t["k_pool"].clone()
        self.run_prefill(qkv)
        if self.a.window is not None:
            assert torch.equal(self.t["k_pool"].view(torch.int16), before.view(torch.int16))
            used = self.t["sequences"][self.t["positions"] >= 0]
            self.commit(torch.bincount(used, minlength=self.sequences).tolist())
        return self._check(*want)

    def run_prefill(self, qkv):
        scratch = variants.prefill_scratch(len(qkv), self.a)
        self.t |= allocate(scratch)
        names = self._names(*scratch)
        held = bool(self.held)
        run(self.t, *variants.prefill(len(qkv), self.a, self.pool, EPS, **names, held=held, tuned=self.tuned))

    def commit(self, counts):
        self.t["counts"] = torch.tensor(counts, dtype=torch.int32)
        names = ("k_new", "v_new", "k_pool", "v_pool", "positions", "sequences", "lengths", "counts", "table")
        run(self.t, variants.commit(len(self.t["qkv"]), self.a, self.pool, **{n: n for n in names}))

    def _names(self, *scratch):
        names = ["qkv", "k_pool", "v_pool", "positions", "sequences", "lengths", "table", "y", "rotation", *scratch]
        names += ["sinks"] * self.a.sinks + ["q_norm", "k_norm"] * self.a.qk_norm
        return {name: name for name in names}

    def _given(self, qkv, positions, sequences, lengths):
        """Sets the step's inputs and poisons its output; returns the reference's y and pools."""
        a, t, rows = self.a, self.t, len(qkv)
        for name, value in (("positions", positions), ("sequences", sequences), ("lengths", lengths)):
            t[name] = torch.tensor(list(value), dtype=torch.int32)
        t["qkv"], t["y"] = qkv, torch.full((rows, a.heads * a.v_head_dim), torch.nan).half()
        t |= allocate({"rotation": variants.rotation_buffer(rows, a)})
        run(t, variants.rotation(rows, a, positions="positions", frequencies="frequencies", out="rotation"))
        shape = Shape(a.heads, a.kv_heads, a.head_dim, a.v_head_dim, a.window or 0, a.scale, a.value_scale, EPS)
        norms = [t["q_norm"], t["k_norm"]] if a.qk_norm else [None, None]
        rest = [t[n] for n in ("positions", "sequences", "lengths", "table", "frequencies")]
        rest += [t["sinks"] if a.sinks else None, *norms]
        if self.held:
            rest.append(torch.tensor(self.held))
        clean = [t[n].nan_to_num(0) for n in ("k_pool", "v_pool")]  # the reference multiplies what no row sees by 0
        y = windowed_attention(shape, qkv.float(), *clean, *rest)[0]
        pools = windowed_attention(shape, qkv.float(), t["k_pool"], t["v_pool"], *rest)[1:]
        if self.held:
            t["lengths"] = torch.cat([t["lengths"], torch.tensor(self.held, dtype=torch.int32)])
        return y, pools

    def _check(self, want, pools):
        y = self.t["y"].clone()
        assert torch.isfinite(y).all()
        assert error(y, want) < 3e-3
        assert not y[self.t["positions"] < 0].any()
        for name, pool in zip(("k_pool", "v_pool"), pools, strict=True):
            got = self.t[name]
            assert torch.equal(got.isnan(), pool.isnan()), f"{name}: other slots were written"
            assert error(got[~got.isnan()], pool[~pool.isnan()]) < 1e-3
        return y


def error(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-20))
