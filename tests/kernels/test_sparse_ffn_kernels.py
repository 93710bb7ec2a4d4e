"""SparseFfn's kernels in Triton's interpreter: the gate's masks and list, the products over the list."""

import pytest
import torch
from launching import run
from packed import close, random_matrix

from mimo_edge.errors import UnsupportedError
from mimo_edge.kernels.sparse_ffn import variants
from mimo_edge.kernels.sparse_ffn.reference import sparse_ffn
from mimo_edge.spec import GateSpec

EPS = 1e-6
INTER, RANK = 384, 24


class Case:
    """A feed-forward with a gate; scores of its blocks are spread so that about `share` of them are kept."""

    def __init__(self, block, t, share=0.5, group=32, bits=4):
        g = torch.Generator().manual_seed(torch.seed() % 2**31)
        self.spec, self.t, self.blocks = GateSpec(block, RANK), t, INTER // block
        k = self.k = 96 if group == 32 else 128
        self.gate_up = random_matrix(2 * INTER, k, group, bits, stacked=2)
        self.down = random_matrix(k, INTER, group, bits)
        x = torch.randn(t, k, generator=g)
        self.norm = torch.rand(k, generator=g) + 0.5
        self.normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.norm
        w1, w2 = torch.randn(RANK, k, generator=g), torch.randn(self.blocks, RANK, generator=g)
        scores = torch.relu(self.normed @ w1.T) @ w2.T
        bias = -scores.flatten().sort().values[int((1 - share) * (scores.numel() - 1))] * torch.ones(self.blocks)
        self.keep = (scores + bias > 0).to(torch.uint8)
        self.unsure = (scores + bias).abs() < 1e-3 * scores.std()  # may fall either way in other arithmetic
        size = variants.listed_size(INTER, block)
        self.buffers = {
            "x": x, "norm": self.norm, "w1": w1, "w2": w2, "bias": bias,
            "normed": torch.full((t, k), torch.nan).half(), "ranks": torch.full((t, RANK), torch.nan),
            "keep": torch.full((t, self.blocks), 9, dtype=torch.uint8),
            "listed": torch.full((size,), 10**6, dtype=torch.int32), "h": torch.full((t, INTER), torch.nan).half(),
            "y": torch.full((t, k), torch.nan), "r": torch.randn(t, k, generator=g),
            "down_bias": torch.randn(k, generator=g),
            **self.gate_up.buffers("gate_up"), **self.down.buffers("down"),
        }  # fmt: skip

    def gate(self):
        names = {n: n for n in ("x", "norm", "w1", "w2", "bias", "normed", "ranks", "keep")}
        run(self.buffers, *variants.gate(self.t, INTER, self.k, self.spec, eps=EPS, **names))

    def decode(self, **more):
        """Gate and products; returns y."""
        self.gate()
        names = ("normed", "ranks", "w2", "bias", "gate_up", "down", "h", "keep", "listed", "y")
        names = {n: n for n in names} | {"residual": "r", "down_bias": "down_bias"}
        launches = variants.decode_sparse(self.t, INTER, self.k, self.gate_up.quant, self.spec, **names, **more)
        run(self.buffers, *launches)
        return self.buffers["y"]

    def prefill(self):
        self.gate()
        names = {n: n for n in ("normed", "gate_up", "down", "h", "keep", "y")}
        names |= {"residual": "r", "down_bias": "down_bias"}
        run(self.buffers, *variants.prefill_sparse(self.t, INTER, self.k, self.gate_up.quant, self.spec, **names))
        return self.buffers["y"]

    def reference(self):
        packed = [tuple(map(torch.from_numpy, m.parts)) for m in (self.gate_up, self.down)]
        out = sparse_ffn(self.normed.half().float(), self.buffers["keep"], *packed, self.gate_up.quant.bits, "silu")
        return out + self.buffers["r"] + self.buffers["down_bias"]


@pytest.mark.parametrize("t", [1, 4])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_masks_and_list(block, t):
    case = Case(block, t)
    case.decode(dense=1.0)
    b = case.buffers
    assert ((b["keep"] == case.keep) | case.unsure).all() and close(b["normed"], case.normed, 1e-3)
    some, unsure = (m.view(t, variants.units(INTER, block), -1).any(2).any(0) for m in (b["keep"], case.unsure))
    dealt = b["listed"][1 : 1 + int(b["listed"][0])].view(-1, variants.DEAL)
    for warp in range(variants.DEAL):
        mine = [u for u in dealt[:, warp].tolist() if u >= 0]
        assert dealt[:, warp].tolist() == mine + [-1] * (len(dealt) - len(mine)) and mine == sorted(set(mine))
        assert all(u % variants.DEAL == warp and (some[u] or unsure[u]) for u in mine)
    assert set(some.nonzero().flatten().tolist()) <= set(dealt.flatten().tolist())


@pytest.mark.parametrize(
    ("block", "group", "bits", "t"), [(16, 32, 4, 3), (32, 128, 4, 1), (64, 64, 4, 2), (32, 32, 8, 8)]
)
def test_products(block, group, bits, t):
    case = Case(block, t, 0.4, group, bits)
    assert close(case.decode(), case.reference(), 2e-3)


def test_no_kept_block_leaves_the_residual():
    case = Case(32, 2)
    case.buffers["bias"][:] = -1e6
    want = case.buffers["r"] + case.buffers["down_bias"]
    assert torch.equal(case.decode(), want) and case.buffers["listed"][0] == 0


def test_weights_of_blocks_that_no_row_keeps_are_not_read():
    case = Case(32, 2, 0.3)
    want = case.decode(dense=1.0).clone()
    listed = case.buffers["listed"]
    skipped = torch.tensor(sorted(set(range(INTER // 32)) - set(listed[1 : 1 + int(listed[0])].tolist())))
    case.buffers["gate_up.scales"][torch.cat([skipped, INTER // 32 + skipped])] = torch.nan
    case.buffers["down.scales"][:, skipped] = torch.nan  # groups of 32
    assert len(skipped) and torch.equal(case.decode(dense=1.0), want)


def test_a_row_s_bits_do_not_depend_on_what_its_neighbours_keep():
    case = Case(32, 4, 0.3)
    together = case.decode(dense=1.0).clone()
    assert case.buffers["listed"][0] > 0
    assert torch.equal(case.decode(dense=0.0), together) and case.buffers["listed"][0] == -1, "the dense path"
    for row in range(4):
        alone = Case(32, 1)
        alone.buffers |= {
            n: case.buffers[n] for n in case.buffers if "." in n or n in ("norm", "w1", "w2", "bias", "down_bias")
        }
        alone.buffers |= {n: case.buffers[n][row : row + 1].clone() for n in ("x", "r")}
        assert torch.equal(alone.decode()[0], together[row])


def test_many_rows_have_the_same_masks():
    case = Case(16, 18, 0.4)
    assert close(case.prefill(), case.reference(), 3e-3)
    assert ((case.buffers["keep"] == case.keep) | case.unsure).all()


def test_blocks_of_other_sizes_are_refused():
    with pytest.raises(UnsupportedError, match="blocks of 48"):
        variants.unit(48)
