"""Single packed layers: every format gives back the integers that went in; files that lie or do not fit are refused."""

import json
import logging

import numpy as np
import pytest
import torch
from packers import FORMATS, Linear, pack, quantization_config, random_linear
from safetensors.torch import save_file

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families.fields import Fields
from mimo_edge.export.families.packed_checkpoint import with_packed
from mimo_edge.export.families.safetensors import open_folder
from mimo_edge.kernels.int4_linear.reference import dequantize

SHAPES = [(8, 32, 32), (40, 192, 64), (96, 384, 128), (24, 96, 32), (16, 512, 256), (8, 192, 96)]
ODD_ROWS = [(1, 64, 32), (7, 96, 32), (35, 128, 64)]


def read(folder, parts, config, layer="model.layers.0.mlp.up_proj"):
    """The layer as it is read from a file with these parts, beside a tensor that stays as it is."""
    save_file(
        {f"{layer}.{n}": t for n, t in parts.items()} | {"norm.weight": torch.ones(3)}, folder / "model.safetensors"
    )
    tensors = with_packed(Fields({"quantization_config": config}, "config.json"), open_folder(folder))
    assert sorted(tensors) == [f"{layer}.weight", "norm.weight"]
    return tensors[f"{layer}.weight"]


def linear(n=16, k=64, group=32, symmetric=False):
    return random_linear(np.random.default_rng(), n, k, group, symmetric)


def assert_equals(layer, w: Linear):
    """Whole and in uneven blocks of rows: integers, scales and zeros, and the weights to the last bit."""
    n, k = w.levels.shape
    assert layer.shape == (n, k) and layer.group == w.group
    for start, stop in [(0, n), (0, 1), (n - 1, n), *np.sort(np.random.randint(0, n + 1, (5, 2)), 1).tolist()]:
        if start == stop:
            continue
        rows = layer.packed_rows(start, stop)
        levels = np.stack((rows.levels & 15, rows.levels >> 4), -1).reshape(stop - start, k)
        assert np.array_equal(levels, w.levels[start:stop])
        assert np.array_equal(rows.scales, w.scales[start:stop]) and rows.scales.dtype == np.float32
        assert np.array_equal(rows.zeros, w.zeros[start:stop])
        got = layer.dequantised(start, stop)
        assert got.dtype == np.float32 and got.flags.c_contiguous and np.array_equal(got, w.weight()[start:stop])


@pytest.mark.parametrize("symmetric", [False, True], ids=["asym", "sym"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES + ODD_ROWS)
def test_integers_come_back_from_every_format(n, k, group, kind, symmetric, tmp_path):
    if kind == "awq" and n % 8:
        return  # eight outputs a word: the format has no other sizes
    w = linear(n, k, group, symmetric)
    layer = read(tmp_path, pack(w, kind, symmetric=symmetric), quantization_config(kind, group, symmetric))
    assert_equals(layer, w)


@pytest.mark.parametrize("kind", FORMATS)
def test_zeros_of_0_and_15_beside_each_other(kind, tmp_path):
    w = linear(64, 128, 32)
    w.zeros[:] = np.random.choice([0, 0, 15, 7, 8], w.zeros.shape)
    w.zeros[:8] = 0
    w.levels[:] = np.clip(np.random.normal(w.zeros.repeat(32, 1), 3).round(), 0, 15)
    assert {0, 15} <= set(w.zeros.ravel().tolist())
    config = quantization_config(kind, 32) | ({"sym": False} if "gptq" in kind else {})
    assert_equals(read(tmp_path, pack(w, kind), config), w)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", FORMATS)
def test_finer_groups_repeat_scales_and_zeros(kind, group, tmp_path):
    w = linear(24, 384, 128)
    layer = read(tmp_path, pack(w, kind), quantization_config(kind, 128))
    q, scales, zeros = layer.regrouped(3, 17, group)
    assert q.shape == (14, 384 // group, group // 2) and zeros.shape == (14, -(-384 // group // 2))
    assert q.dtype == zeros.dtype == np.uint8 and scales.dtype == np.float32
    assert np.array_equal(dequantize(*map(torch.from_numpy, (q, scales, zeros)), 4).numpy(), w.weight()[3:17])


@pytest.mark.parametrize("kind", FORMATS)
def test_one_group_a_row(kind, tmp_path):
    w = linear(16, 96, 96)
    config = quantization_config(kind, -1)
    if kind == "compressed-tensors":
        config["config_groups"]["group_0"]["weights"] |= {"strategy": "channel", "group_size": None}
    assert_equals(read(tmp_path, pack(w, kind), config), w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["gptq_v2", "compressed-tensors"])
def test_scales_of_other_types_that_are_float16_values(kind, dtype, tmp_path):
    w = linear()
    w.scales = torch.from_numpy(w.scales).bfloat16().float().numpy()  # 8 bits, of normal float16 size
    assert_equals(read(tmp_path, pack(w, kind, dtype), quantization_config(kind, 32)), w)


def test_scales_may_be_negative_or_zero_or_subnormal(tmp_path):
    w = linear()
    w.scales[:3, 0] = -0.25, 0, 2.0**-24
    assert_equals(read(tmp_path, pack(w, "gptq"), quantization_config("gptq", 32)), w)


@pytest.mark.parametrize("says", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stores", ["gptq", "gptq_v2"])
def test_symmetric_zeros_tell_the_convention_whatever_the_config_says(stores, says, tmp_path, caplog):
    w = linear(symmetric=True)
    layer = read(tmp_path, pack(w, stores), quantization_config(says, 32, symmetric=True))
    assert_equals(layer, w)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == (stores != says) and all("1 layers (model.layers.0.mlp.up_proj" in m for m in warnings)


@pytest.mark.parametrize(("stores", "says"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_the_wrong_convention_of_asymmetric_zeros_is_noticed(stores, says, tmp_path):
    w = linear(96, 512, 32)
    with pytest.raises(BadInputError, match=rf"checkpoint_format is '{says}'.* is it '{stores}'\?"):
        read(tmp_path, pack(w, stores), quantization_config(says, 32))
    assert_equals(read(tmp_path, pack(w, stores), quantization_config(stores, 32)), w)


def test_zeros_of_0_in_v1_by_an_unknown_writer(tmp_path):
    """Stored as 15, and nothing tells whether the neighbour lent one: refused, unless no reading differs."""
    config = quantization_config("gptq", 32) | {"meta": None}
    w = linear(64, 128, 32)
    w.zeros[5, 1] = 0
    with pytest.raises(UnsupportedError, match=r"up_proj\.qzeros.*gptq_v2"):
        read(tmp_path, pack(w, "gptq"), config)
    w.zeros = np.maximum(w.zeros, 1)
    w.zeros[7::8, 1] = 0  # the last of a word has no neighbour
    assert_equals(read(tmp_path, pack(w, "gptq"), config), w)


def test_symmetric_by_the_config_but_not_by_its_zeros(tmp_path):
    with pytest.raises(
        BadInputError, match=r"up_proj\.qzeros in .* holds zeros from \d+ to \d+, but the config says sym"
    ):
        read(tmp_path, pack(linear(), "gptq_v2"), quantization_config("gptq_v2", 32, symmetric=True))


def refused(folder, kind, error, match, change=None, w=None, **config):
    """`change` alters the parts. The message is one line."""
    parts = pack(w or linear(), kind)
    if change:
        change(parts)
    with pytest.raises(error, match=match) as caught:
        read(folder, parts, quantization_config(kind, 32) | config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["gptq", "gptq_v2"])
def test_activation_order(kind, tmp_path):
    def reorder(parts):
        parts["g_idx"] = parts["g_idx"][torch.randperm(64, generator=torch.Generator().manual_seed(1))]

    refused(tmp_path, kind, UnsupportedError, r"up_proj\.g_idx .* activation order", reorder)
    refused(tmp_path, kind, UnsupportedError, r"up_proj\.g_idx .* activation order", reorder, desc_act=True)
    refused(tmp_path, kind, UnsupportedError, r"qweight .* no g_idx", lambda p: p.pop("g_idx"), desc_act=True)
    w = linear()  # with desc_act, but in order after all
    config = quantization_config(kind, 32) | {"desc_act": True}
    assert_equals(read(tmp_path, pack(w, kind), config), w)


MAIN = {"awq": "qweight", "gptq": "qweight", "compressed-tensors": "weight_packed"}


@pytest.mark.parametrize("kind", MAIN)
def test_sizes_that_do_not_fit(kind, tmp_path):
    main, scales = MAIN[kind], "weight_scale" if kind == "compressed-tensors" else "scales"
    cut = (lambda t: t[:-1]) if kind == "compressed-tensors" else (lambda t: t[:, :-1])

    def set_part(name, f):
        return lambda parts: parts.update({name: f(parts[name]).contiguous()})

    k40 = Linear(np.full((8, 40), 8, np.uint8), np.ones((8, 2), np.float32), np.full((8, 2), 8, np.uint8))
    refused(tmp_path, kind, UnsupportedError, rf"up_proj\.{main} .* 40 weights .* groups of 32", w=k40)
    w16 = linear(8, 64, 16)
    size = {"group_size": 16} if kind != "compressed-tensors" else {}
    if kind == "compressed-tensors":
        size = {"config_groups": quantization_config(kind, 16)["config_groups"]}
    refused(tmp_path, kind, UnsupportedError, rf"up_proj\.{main}.* groups of 16 .* multiples of 32", w=w16, **size)
    refused(
        tmp_path, kind, BadInputError, rf"up_proj\.{main}.* make 1 groups .* 64 .* group_size 32", w=linear(8, 64, 64)
    )
    refused(tmp_path, kind, BadInputError, r"up_proj\.\w+ .* has shape", set_part(scales, cut))
    refused(tmp_path, kind, BadInputError, r"up_proj\.\w+ .* has shape", set_part(scales, lambda t: t[0]))
    refused(tmp_path, kind, UnsupportedError, rf"up_proj\.{main} .* I64", set_part(main, lambda t: t.long()))
    refused(
        tmp_path,
        kind,
        UnsupportedError,
        rf"up_proj\.{main} .* I32 \[16\]",
        set_part(main, lambda t: t[0][:1].repeat(16)),
    )
    refused(tmp_path, kind, UnsupportedError, r"up_proj\.\w*scales? .* F64", set_part(scales, lambda t: t.double()))
    refused(tmp_path, kind, BadInputError, rf"up_proj\.{scales} is missing", lambda p: p.pop(scales))
    refused(tmp_path, kind, BadInputError, r"up_proj\.weight too", lambda p: p.update(weight=torch.ones(16, 64)))


@pytest.mark.parametrize("kind", MAIN)
def test_scales_that_cannot_be_kept(kind, tmp_path):
    name = "weight_scale" if kind == "compressed-tensors" else "scales"

    def put(value, dtype):
        def change(parts):
            parts[name] = parts[name].to(dtype)
            parts[name][1, 1] = value

        return change

    for value in (np.nan, np.inf):
        refused(tmp_path, kind, BadInputError, rf"up_proj\.{name} .* NaN or inf", put(value, torch.float16))
    for value, dtype in ((1 / 3, torch.float32), (2.0**17, torch.bfloat16), (1.2e-7, torch.bfloat16)):
        refused(
            tmp_path,
            kind,
            UnsupportedError,
            rf"up_proj\.{name} .* holds 1 \w+ scales that are not float16",
            put(value, dtype),
        )


CONFIGS = [
    ("awq", {"bits": 8}, UnsupportedError, r"bits 8 .*\(supported: 4\)"),
    ("awq", {"bits": None}, BadInputError, "no w_bit"),
    ("awq", {"version": "gemv"}, UnsupportedError, "version 'gemv'"),
    ("awq", {"version": "llm-awq"}, UnsupportedError, "version 'llm-awq'"),
    ("awq", {"group_size": None}, BadInputError, "no q_group_size"),
    ("gptq", {"bits": 8}, UnsupportedError, r"bits 8 .*\(supported: 4\)"),
    ("gptq", {"bits": "4"}, BadInputError, "bits '4' is not an integer"),
    ("gptq", {"checkpoint_format": "marlin"}, UnsupportedError, "checkpoint_format 'marlin'"),
    ("gptq", {"is_marlin_format": True}, UnsupportedError, "is_marlin_format True"),
    ("gptq", {"pack_dtype": "int16"}, UnsupportedError, "pack_dtype 'int16'"),
    ("compressed-tensors", {"format": "float-quantized"}, UnsupportedError, "format 'float-quantized'"),
    ("compressed-tensors", {"format": "nvfp4-pack-quantized"}, UnsupportedError, "format 'nvfp4-pack-quantized'"),
    ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8}}, UnsupportedError, "kv_cache_scheme"),
    ("compressed-tensors", {"sparsity_config": {"format": "sparse-24-bitmask"}}, UnsupportedError, "sparse-24"),
    ("compressed-tensors", {"config_groups": {}}, BadInputError, "no config_groups"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "error", "match"), CONFIGS, ids=[f"{c[0]}-{c[1]}" for c in CONFIGS])
def test_configs_that_are_refused(kind, change, error, match, tmp_path):
    refused(tmp_path, kind, error, match, **change)


SCHEMES = [
    ({"weights": {"num_bits": 8}}, "num_bits 8"),
    ({"weights": {"type": "float"}}, "type 'float'"),
    ({"weights": {"strategy": "block"}}, "strategy 'block'"),
    ({"weights": {"dynamic": True}}, "dynamic True"),
    ({"input_activations": {"num_bits": 8}}, "input_activations"),
    ({"format": "int-quantized"}, "format 'int-quantized'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "match"), SCHEMES, ids=[c[1] for c in SCHEMES])
def test_schemes_that_are_refused(change, match, tmp_path):
    config = quantization_config("compressed-tensors", 32)
    scheme = json.loads(json.dumps(config["config_groups"]["group_0"]))
    scheme = {**scheme, **change, "weights": {**scheme["weights"], **change.get("weights", {})}}
    refused(tmp_path, "compressed-tensors", UnsupportedError, match, config_groups={"group_0": scheme})


def test_zero_points_must_agree_with_the_schemes(tmp_path):
    w = linear()
    for symmetric, match in (
        (False, "no weight_zero_point, but .* asymmetric"),
        (True, "a weight_zero_point, but .* only symm"),
    ):
        config = quantization_config("compressed-tensors", 32, symmetric)
        with pytest.raises(BadInputError, match=match.replace("asymmetric", "only asymmetric")):
            read(tmp_path, pack(w, "compressed-tensors", symmetric=not symmetric), config)


def test_a_shape_that_contradicts_the_integers(tmp_path):
    refused(tmp_path, "compressed-tensors", BadInputError, r"weight_shape .* says \[16, 60\], .* \[16, 64\]",
            lambda p: p.update(weight_shape=torch.tensor([16, 60])))  # fmt: skip


def test_single_layers_with_their_own_group(tmp_path):
    """GPTQModel's `dynamic`: the group follows from the scales."""
    w = linear(16, 128, 64)
    config = quantization_config("gptq", 32) | {"dynamic": {"+:.*up_proj": {"group_size": 64}}}
    assert_equals(read(tmp_path, pack(w, "gptq"), config), w)


def test_a_file_that_has_become_shorter(tmp_path):
    w = linear(64, 128, 32)
    layer = read(tmp_path, pack(w, "awq"), quantization_config("awq", 32))
    with (tmp_path / "model.safetensors").open("r+b") as f:
        f.truncate(layer.offset + layer.nbytes // 2)
    with pytest.raises(BadInputError, match=r"up_proj\.\w+ in .* ends inside the tensor"):
        layer.dequantised(0, 8)
