"""Int4Linear's kernels in Triton's interpreter against the reference: odd sizes, every group, poisoned outputs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from launching import run
from packed import Matrix, close, random_matrix

from mimo_edge.errors import UnsupportedError
from mimo_edge.kernels.int4_linear import layout, variants
from mimo_edge.kernels.int4_linear.variants import Tuned, TunedMany
from mimo_edge.spec import TensorQuant

EPS = 1e-6


def rows(t, k, dtype=torch.float16):
    return torch.randn(t, k).to(dtype)


def nan(*shape, dtype=torch.float32):
    return torch.full(shape, torch.nan, dtype=dtype)


def rmsnorm(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w


@pytest.mark.parametrize("t", [1, 2, 5, 8])
@pytest.mark.parametrize(
    ("n", "k", "group", "bits", "cut"),
    [
        (70, 256, 128, 4, Tuned(1, 2, 3)),
        (33, 96, 32, 4, Tuned(1, 1, 2)),
        (100, 320, 64, 4, Tuned(2, 4, 2)),
        (40, 384, 128, 8, Tuned(1, 4, 3)),
        (7, 160, 32, 8, Tuned(1, 2, 2)),
    ],
    ids=["n70-k256-g128", "n33-k96-g32", "n100-k320-g64", "w8-n40-k384-g128", "w8-n7-k160-g32"],
)
def test_decode(t, n, k, group, bits, cut):
    m = random_matrix(n, k, group, bits)
    x, bias, residual = rows(t, k), torch.randn(n), torch.randn(t, n)
    names = {"x": x, "bias": bias, "r": residual, "y": nan(t, n, dtype=torch.float16), "z": nan(t, n), **m.buffers("w")}
    plain = {"x": "x", "w": "w", "tuned": cut}
    run(names, *variants.decode(t, n, k, m.quant, y="y", bias="bias", **plain))
    assert close(names["y"], m.product(x) + bias, 1e-3)
    run(names, *variants.decode(t, n, k, m.quant, y="z", residual="r", out="fp32", **plain))
    assert close(names["z"], m.product(x) + residual, 1e-5)
    run(names, *variants.decode(t, n, k, m.quant, y="r", residual="r", out="fp32", **plain))
    assert torch.equal(names["r"], names["z"]), "in place"


def test_decode_with_a_norm_in_front_and_strides():
    n, k, t = 40, 128, 3
    m = random_matrix(n, k, 64, 4)
    x, w = torch.randn(t, k) * 300, torch.rand(k) + 0.5
    names = {"x": x, "norm": w, "normed": nan(t, k, dtype=torch.float16), "y": nan(t, n), **m.buffers("w")}
    launches = variants.decode(t, n, k, m.quant, x="x", w="w", y="y", norm="norm", normed="normed", eps=EPS, out="fp32")
    run(names, *launches)
    assert close(names["y"], m.product(rmsnorm(x, w)), 2e-3)
    wide = {"x": nan(t, 2 * k, dtype=torch.float16), "y": nan(t, 2 * n), **m.buffers("w")}
    wide["x"][:, :k] = names["normed"]
    run(wide, *variants.decode(t, n, k, m.quant, x="x", w="w", y="y", out="fp32", x_stride=2 * k, y_stride=2 * n))
    assert torch.equal(wide["y"][:, :n], names["y"]) and wide["y"][:, n:].isnan().all()


def test_the_norm_s_other_programs_cover_what_is_to_be_prefetched():
    m, names = random_matrix(100, 256, 64, 4), {"x": "x", "w": "w", "y": "y", "norm": "n", "normed": "s"}
    for ahead, lines in ((0, 0), (1024, 4 * 8), (10**9, 4 * 256 * 4 * 4 // 128)):
        first, product = variants.decode(3, 100, 256, m.quant, tuned=Tuned(ahead=ahead), **names)
        share = first.variant.constants["SHARE"]
        assert first.grid[0] == 3 + -(-lines // share) and not product.variant.constants["PDL"]
        assert first.variant.constants["AHEAD"] * 4 * 4 == lines * 128  # bytes of 4 tiles
    x, out = torch.randn(3, 256), nan(3, 256, dtype=torch.float16)
    buffers = {"x": x, "n": torch.rand(256), "s": out, "y": nan(3, 100, dtype=torch.float16), **m.buffers("w")}
    run(buffers, first)
    assert close(out, rmsnorm(x, buffers["n"]), 1e-3)


def test_a_row_s_bits_do_not_depend_on_the_others():
    n, k = 64, 256
    m = random_matrix(n, k, 32, 4)
    x = rows(8, k)
    outs = []
    for take in (slice(0, 8), slice(2, 5), slice(3, 4)):
        part = {"x": x[take].contiguous(), "y": nan(len(x[take]), n), **m.buffers("w")}
        run(part, *variants.decode(len(part["x"]), n, k, m.quant, x="x", w="w", y="y", out="fp32"))
        outs.append(part["y"][3 - take.start])
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_half_precision_results_stay_finite():
    m = random_matrix(32, 128, 128, 4)
    names = {"x": torch.full((1, 128), 60000.0).half(), "y": nan(1, 32, dtype=torch.float16), **m.buffers("w")}
    run(names, *variants.decode(1, 32, 128, m.quant, x="x", w="w", y="y"))
    assert names["y"].isfinite().all() and names["y"].abs().max() == 65504


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_zeros_and_subnormal_scales(bits):
    m = random_matrix(32, 128, 32, bits)
    m.scales[3, :], m.scales[4, 1], m.scales[5, :] = 0, 0, 6e-8
    m.zeros[:] = m.zeros | 0
    x = rows(2, 128)
    for t, launches in ((2, variants.decode), (16, variants.prefill)):
        x = rows(t, 128)
        names = {"x": x, "y": nan(t, 32), **m.buffers("w")}
        run(names, *launches(t, 32, 128, m.quant, x="x", w="w", y="y", out="fp32"))
        assert names["y"].isfinite().all() and not names["y"][:, 3].any() and close(names["y"], m.product(x), 2e-3)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("i", "k", "bits"), [(96, 128, 4), (50, 64, 4), (32, 96, 8)])
def test_gate_and_up(i, k, bits, activation):
    m = random_matrix(2 * i, k, 32, bits, stacked=2)
    gate, up = torch.randn(3, 1), None
    for t, make in ((3, variants.decode_gate_up), (17, variants.prefill_gate_up)):
        x = rows(t, k)
        gate, up = m.product(x).chunk(2, dim=-1)
        act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        names = {"x": x, "h": nan(t, i, dtype=torch.float16), **m.buffers("w")}
        run(names, *make(t, i, k, m.quant, x="x", w="w", h="h", activation=activation))
        assert close(names["h"], act * up, 2e-3)


def test_head_gives_logits_and_each_program_s_best():
    n, k, t = 150, 64, 4
    m = random_matrix(n, k, 64, 4)
    m.q[100:], m.scales[100:], m.zeros[100:] = m.q[:50], m.scales[:50], m.zeros[:50]  # ties across programs
    m.q[33], m.scales[33], m.zeros[33] = m.q[32], m.scales[32], m.zeros[32]  # a tie inside one
    cut = Tuned(2, 1, 2)
    programs = variants.head_programs(n, cut)
    names = {
        "x": rows(t, k),
        "y": nan(t, n),
        "b": nan(t, programs),
        "i": torch.full((t, programs), -1, dtype=torch.int32),
    }
    names |= m.buffers("w")
    run(names, *variants.decode_head(t, n, k, m.quant, x="x", w="w", y="y", best="b", best_index="i", tuned=cut))
    assert close(names["y"], m.product(names["x"]), 1e-5)
    for p, part in enumerate(names["y"].split(64, dim=1)):
        assert torch.equal(names["b"][:, p], part.max(dim=1).values)
        first = (part == part.max(dim=1, keepdim=True).values).int().argmax(dim=1)
        assert torch.equal(names["i"][:, p].long(), 64 * p + first)


def test_head_of_a_row_that_is_not_the_first():
    m, x, norm = random_matrix(40, 64, 64, 4), torch.randn(4, 64), 1 + torch.rand(64)
    names = {"x": x, "n": norm, "s": nan(1, 64, dtype=torch.float16), "y": nan(1, 40), "b": nan(1, 2)}
    names |= {"i": torch.full((1, 2), -1, dtype=torch.int32), **m.buffers("w")}
    of = {"x": "x", "w": "w", "y": "y", "best": "b", "best_index": "i", "norm": "n", "normed": "s"}
    run(names, *variants.decode_head(1, 40, 64, m.quant, first=2, **of))
    assert close(names["y"], m.product(F.rms_norm(x[2:3], (64,), norm)), 2e-3)


@pytest.mark.parametrize(
    ("t", "n", "k", "group", "bits", "cut"),
    [
        (16, 70, 96, 32, 4, TunedMany(4, 16, 2, 2)),
        (37, 130, 256, 128, 4, TunedMany(4, 32, 4, 2)),
        (20, 40, 128, 64, 8, TunedMany(2, 16, 4, 1)),
    ],
    ids=["t16-k96-g32", "t37-k256-g128", "w8-t20-k128-g64"],
)
def test_prefill(t, n, k, group, bits, cut):
    m = random_matrix(n, k, group, bits)
    x, bias, residual = rows(t, k), torch.randn(n), torch.randn(t, n)
    names = {"x": x, "bias": bias, "r": residual, "y": nan(t, n, dtype=torch.float16), "z": nan(t, n), **m.buffers("w")}
    run(names, *variants.prefill(t, n, k, m.quant, x="x", w="w", y="y", bias="bias", tuned=cut))
    assert close(names["y"], m.product(x) + bias, 2e-3)
    run(names, *variants.prefill(t, n, k, m.quant, x="x", w="w", y="z", residual="r", out="fp32", tuned=cut))
    assert close(names["z"], m.product(x) + residual, 2e-3)


def test_pieces_of_rows_pack_to_the_same_buffers():
    m = random_matrix(2 * 70, 64, 32, 4, stacked=2)
    whole = m.buffers("w")
    shapes = layout.shapes(140, 64, m.quant, 2)
    for part, (_, shape) in shapes.items():
        out = np.full(shape, 77, dtype=whole[f"w.{part}"].numpy().dtype)
        for start, stop, tile in layout.row_blocks(140, 2, 32):
            piece = layout.pack(m.q[start:stop], m.scales[start:stop], m.zeros[start:stop], 4)
            out[tile : tile + len(piece.q)] = getattr(piece, part)
        assert np.array_equal(out, whole[f"w.{part}"].numpy())


def test_what_the_kernels_refuse_and_the_rules_of_a_cut():
    m = Matrix(*random_matrix(32, 64, 32, 4).parts, TensorQuant(4, 32))
    with pytest.raises(UnsupportedError, match="9 rows"):
        variants.decode(9, 32, 64, m.quant, x="x", w="w", y="y")
    with pytest.raises(ValueError, match="normed"):
        variants.decode(1, 32, 64, m.quant, x="x", w="w", y="y", norm="n")
    rules = [
        {"tiles": 1, "row_tiles": 1, "warps": 8, "stages": 3},
        {"tiles": 9, "row_tiles": 2, "warps": 2, "stages": 4},
    ]
    assert variants.choose(rules, 256, 4096) == Tuned(1, 8, 3) and variants.choose(rules, 257, 4096) == Tuned(2, 2, 4)
    assert variants.choose(rules, 32, 256).warps == 2, "a warp needs a unit of K"
