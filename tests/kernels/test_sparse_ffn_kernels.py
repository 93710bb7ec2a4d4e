"""SparseFfn's kernels in Triton's interpreter: the gate's masks and list, the products over the list."""

import pytest
import torch
from launching import run
from packed import close, random_matrix

from mimo_edge.errors import UnsupportedError
from mimo_edge.kernels.sparse_ffn import variants
from mimo_edge.kernels.sparse_ffn.reference import sparse_ffn
from mimo_edge.spec import GateSpec, TensorQuant

EPS = 1e-6
INTER, RANK = 384, 24
SAME = ("x", "norm", "w1", "w2", "bias", "normed", "ranks", "keep", "gate_up", "down", "h", "y")


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

    def _run(self, of, names, more):
        names = {n: n for n in (*names.split(), *SAME)} | {"residual": "r", "down_bias": "down_bias", "eps": EPS}
        run(self.buffers, *of(self.t, INTER, self.k, self.gate_up.quant, self.spec, **names, **more))
        return self.buffers["y"]

    def decode(self, **more):
        return self._run(variants.decode_sparse, "listed", more)

    def prefill(self):
        return self._run(variants.prefill_sparse, "", {})

    def reference(self):
        packed = [tuple(map(torch.from_numpy, m.parts)) for m in (self.gate_up, self.down)]
        out = sparse_ffn(self.normed.half().float(), self.buffers["keep"], *packed, self.gate_up.quant.bits, "silu")
        return out + self.buffers["r"] + self.buffers["down_bias"]


@pytest.mark.parametrize("t", [1, 4])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_masks_and_list(block, t):
    case, deal = Case(block, t), variants.DOWN.warps
    case.decode(dense=1.0)
    b = case.buffers
    assert ((b["keep"] == case.keep) | case.unsure).all() and close(b["normed"], case.normed, 1e-3)
    some = b["keep"].view(t, variants.units(INTER, block), -1).any(2).any(0)
    dealt = b["listed"][2 : 2 + int(b["listed"][0])].view(-1, deal)
    for warp in range(deal):
        mine = [u for u in dealt[:, warp].tolist() if u >= 0]
        assert dealt[:, warp].tolist() == mine + [-1] * (len(dealt) - len(mine)) and mine == sorted(set(mine))
        assert all(u % deal == warp and some[u] for u in mine)
    assert set(some.nonzero().flatten().tolist()) == set(dealt.flatten().tolist()) - {-1}


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
    skipped = torch.tensor(sorted(set(range(INTER // 32)) - set(listed[2 : 2 + int(listed[0])].tolist())))
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


def test_the_list_is_made_by_one_program_behind_those_it_waits_for():
    names = {n: n for n in (*SAME, "listed")}
    _, kept, _ = variants.decode_sparse(1, INTER, 128, TensorQuant(4, 64), GateSpec(32, RANK), eps=EPS, **names)
    assert kept.grid == (INTER // 32 + 1, 1, 1)


def test_many_rows_have_the_same_masks():
    case = Case(16, 18, 0.4)
    assert close(case.prefill(), case.reference(), 3e-3)
    assert ((case.buffers["keep"] == case.keep) | case.unsure).all()


def test_blocks_of_other_sizes_are_refused():
    with pytest.raises(UnsupportedError, match="blocks of 48"):
        variants.unit(48)
