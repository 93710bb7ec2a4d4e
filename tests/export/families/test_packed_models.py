"""Whole folders in every 4-bit format: read, exported without quantising again, and run."""

import itertools
import json
import logging

import numpy as np
import pytest
import torch
from folders import assert_same, edit_json, expected_parameters, save_tokenizer
from packers import FORMATS, pack, quantization_config, random_linear, random_model
from rows import error, feed, whole
from safetensors.torch import load_file, save_file

from mimo_edge.backends.onnxruntime import OnnxRuntimeBackend
from mimo_edge.backends.reference import BundleWeights
from mimo_edge.bundle import WEIGHTS, Bundle, read_tensors
from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families import open_checkpoint
from mimo_edge.export.pipeline import export_bundle, uniform
from mimo_edge.export.quantize.perplexity import ReadySource, read_restored
from mimo_edge.export.quantize.rtn import quantize_rows
from mimo_edge.kernels.int4_linear.reference import dequantize
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.pools import KvPools
from mimo_edge.params import parameters
from mimo_edge.spec import QuantSpec, TensorQuant

SEED = int(np.random.default_rng().integers(1 << 30))
UP, Q = "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"


def bundle_weights(bundle: Bundle) -> dict[str, np.ndarray]:
    weights = BundleWeights(bundle.spec, read_tensors(bundle.file(WEIGHTS)))
    return {p.name: weights.get(p.name).numpy() for p in parameters(bundle.spec)}


@pytest.fixture(scope="module", params=[False, True], ids=["asym", "sym"])
def model(request):
    return random_model(SEED, symmetric=request.param)


@pytest.mark.parametrize("kind", FORMATS)
def test_source_reads_the_dequantised_weights(kind, model, tmp_path):
    checkpoint = open_checkpoint(model.write(tmp_path / "m", kind))
    assert_same(checkpoint, expected_parameters(model.state(), checkpoint.spec))
    four = TensorQuant(4, 32)
    assert checkpoint.packed == QuantSpec(four, four) and checkpoint.spec.quant == QuantSpec()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_bundle_holds_the_same_integers_in_every_format(kind, model, tmp_path, monkeypatch):
    """Everything else takes the usual way: here 8 bits for the embedding, float for the head."""
    monkeypatch.setattr("mimo_edge.export.pipeline._BLOCK_BYTES", 9000)
    quant = QuantSpec(TensorQuant(4, 32), TensorQuant(4, 32), TensorQuant(8, 64))
    bundle = export_bundle(model.write(tmp_path / "m", kind), tmp_path / "b", quant=quant)
    expected = {n: t.numpy() for n, t in expected_parameters(model.state(), bundle.spec).items()}
    expected["embed"] = dequantize(
        *map(torch.from_numpy, quantize_rows(expected["embed"], TensorQuant(8, 64))), bits=8
    ).numpy()
    got = bundle_weights(bundle)
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        assert np.array_equal(got[name], want), name
    gate, up = (model.linears[f"model.layers.0.mlp.{n}_proj"] for n in ("gate", "up"))
    q = read_tensors(bundle.file(WEIGHTS))["layers.0.gate_up.q"]
    levels = np.stack((q & 15, q >> 4), -1).reshape(len(q), -1)
    assert np.array_equal(levels, np.concatenate((gate.levels, up.levels)))


@pytest.mark.parametrize("kind", FORMATS)
def test_an_export_with_measured_formats_runs_like_the_oracle(kind, tmp_path):
    bundle = export_bundle(random_model(SEED).write(tmp_path / "m", kind), tmp_path / "b")
    four = TensorQuant(4, 32)
    assert bundle.spec.quant.attention == bundle.spec.quant.ffn == four
    measured = json.loads(bundle.file("quantization.json").read_text())["measured"]
    assert measured and all(m["quant"]["attention"] in ({"bits": 4, "group": 32}, None) for m in measured)
    backend = OnnxRuntimeBackend.open(bundle, threads=1, float_activations=True)
    layout = plan_layout(bundle.spec, 64, sequences=1, page_size=5)
    backend.allocate(layout)
    tokens = np.random.default_rng(SEED).integers(0, 258, 41)
    weights = BundleWeights(bundle.spec, read_tensors(bundle.file(WEIGHTS)))
    got = feed(backend, KvPools(layout).admit(41), tokens, [7, 1, 20, 13])
    assert error(got, whole(bundle.spec, weights, tokens)) < 1e-5


def test_groups_of_128_are_kept_and_finer_ones_repeat_their_scales(tmp_path, caplog):
    model = random_model(SEED, group=128)
    folder = model.write(tmp_path / "m", "gptq")
    own, q = TensorQuant(4, 128), TensorQuant(8, 32)
    kept = export_bundle(folder, tmp_path / "kept", quant=QuantSpec(own, own, q, q))
    assert kept.spec.quant.ffn == own  # a small model: asked for, coarse groups would be refused
    finer = export_bundle(folder, tmp_path / "finer", quant=uniform(4, 32))
    a, b = bundle_weights(kept), bundle_weights(finer)
    assert all(np.array_equal(a[n], b[n]) for n in a if n not in ("embed", "head"))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    with pytest.raises(BadInputError, match=r"groups of 128 \(embedding\)"):
        export_bundle(folder, tmp_path / "b", quant=uniform(4, 128))


def test_another_format_is_quantised_again_and_says_so(model, tmp_path, caplog):
    folder = model.write(tmp_path / "m", "awq")
    bundle = export_bundle(folder, tmp_path / "b", quant=uniform(8, 32))
    got = bundle_weights(bundle)
    for name, want in expected_parameters(model.state(), bundle.spec).items():
        assert np.abs(got[name] - want.numpy()).max() <= np.abs(want.numpy()).max() / 100, name
    said = [r.getMessage() for r in caplog.records if "quantised again" in r.getMessage()]
    assert said == [
        f"{kind} weights, in the checkpoint 4 bits in groups of 32, are quantised again to 8 bits in groups of 32"
        for kind in ("attention", "ffn")
    ]
    export_bundle(folder, tmp_path / "float", quant=QuantSpec())
    assert len([r for r in caplog.records if "quantised again" in r.getMessage()]) == 2


def test_measuring_sees_what_the_bundle_will_hold(model, tmp_path):
    source = open_checkpoint(model.write(tmp_path / "m", "awq")).source
    assert isinstance(source, ReadySource)

    def refuse(*args):
        raise AssertionError("quantised again")

    got = read_restored(source, "layers.0.qkv", 3, 90, TensorQuant(4, 32), refuse)
    assert np.array_equal(got.numpy(), source.read("layers.0.qkv", 3, 90))
    assert source.ready("layers.0.qkv", TensorQuant(8, 32), 0, 4) is None
    assert source.ready("layers.0.qkv", TensorQuant(4, 64), 0, 4) is None
    assert source.ready("embed", TensorQuant(4, 32), 0, 4) is None


def change(folder, put=None, drop=()):
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if not n.startswith(tuple(drop))}
    save_file(tensors | (put or {}), folder / "model.safetensors")
    return folder


def test_a_layer_left_in_float_gets_the_format_of_its_kind(model, tmp_path, caplog):
    o = "model.layers.1.self_attn.o_proj"
    weight = torch.randn(64, 64).half()
    folder = change(model.write(tmp_path / "m", "awq"), {f"{o}.weight": weight}, [f"{o}."])
    four = TensorQuant(4, 32)
    bundle = export_bundle(folder, tmp_path / "b", quant=QuantSpec(four, four))
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        f"1 layers ({o}.weight, ...) are in float beside packed ones: they are quantised to 4 bits in groups of 32 too"
    ]
    got, want = bundle_weights(bundle), expected_parameters(model.state(), bundle.spec)
    rounded = dequantize(*map(torch.from_numpy, quantize_rows(weight.float().numpy(), four)), bits=4)
    assert np.array_equal(got["layers.1.o"], rounded.numpy())
    assert np.array_equal(got["layers.0.o"], want["layers.0.o"].numpy())


def test_a_whole_kind_left_in_float_is_free(model, tmp_path):
    attention = [n for n in model.linears if "self_attn" in n]
    floats = {f"{n}.weight": torch.from_numpy(model.linears[n].weight()) for n in attention}
    folder = change(model.write(tmp_path / "m", "compressed-tensors"), floats, [f"{n}.weight_" for n in attention])
    checkpoint = open_checkpoint(folder)
    assert checkpoint.packed == QuantSpec(ffn=TensorQuant(4, 32))
    assert_same(checkpoint, expected_parameters(model.state(), checkpoint.spec))


def refuse(folder, error, *words):
    with pytest.raises(error) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value) and all(w in str(caught.value) for w in words), str(caught.value)


def test_a_fused_parameter_must_be_packed_as_a_whole(model, tmp_path):
    folder = change(
        model.write(tmp_path / "m", "gptq"), {f"{Q}.weight": torch.randn(64, 64)}, [f"{Q}.{part}" for part in "qsg"]
    )
    refuse(folder, UnsupportedError, f"{Q}.weight", "k_proj.qweight", "in float")


def test_biases_without_a_place_must_be_zero(model, tmp_path):
    folder = model.write(tmp_path / "m", "gptq")
    zero = {f"{n}.bias": torch.zeros(len(w.levels)).half() for n, w in model.linears.items() if "qkv" not in n}
    change(folder, {n: t for n, t in zero.items() if n not in model.floats})
    checkpoint = open_checkpoint(folder)
    assert_same(checkpoint, expected_parameters(model.state(), checkpoint.spec))
    change(folder, {f"{UP}.bias": torch.full((96,), 1e-3).half()})
    refuse(folder, UnsupportedError, f"{UP}.bias", "no place")


def test_shapes_that_are_not_the_configs(model, tmp_path):
    wide = random_linear(np.random.default_rng(), 96, 128, 32, model.symmetric)
    parts = {f"{UP}.{n}": t for n, t in pack(wide, "gptq").items()}
    refuse(change(model.write(tmp_path / "m", "gptq"), parts), BadInputError, f"{UP}.qweight", "[96, 128]", "[96, 64]")


def test_missing_layers_and_unpacked_folders(model, tmp_path):
    refuse(change(model.write(tmp_path / "a", "awq"), drop=[UP]), UnsupportedError, f"{UP}.weight is missing", "awq")
    floats = {f"{n}.weight": torch.from_numpy(w.weight()) for n, w in model.linears.items()}
    folder = change(model.write(tmp_path / "b", "awq"), floats, [f"{n}." for n in model.linears if "qkv" not in n])
    change(folder, model.floats)
    refuse(folder, BadInputError, "quant_method 'awq'", "no layer is packed")
    for method in ("fp8", "bitsandbytes"):
        edit_json(folder / "config.json", quantization_config={"quant_method": method})
        change(folder, {f"{UP}.weight": torch.zeros(96, 64).to(torch.float8_e4m3fn)})
        refuse(folder, UnsupportedError, UP, "F8_E4M3")


def test_a_packed_head_and_groups_of_several_sizes(tmp_path):
    """The head is quantised too, and single layers have coarser groups: each kind gets what divides all of its own."""
    model = random_model(SEED, group=64)
    rng = np.random.default_rng(SEED)
    model.floats.pop("lm_head.weight")
    model.linears["lm_head"] = random_linear(rng, 258, 64, 64)
    folder = model.write(tmp_path / "m", "gptq_v2")
    coarse = random_linear(rng, 64, 192, 192)
    down = "model.layers.1.mlp.down_proj"
    model.linears[down] = coarse
    change(folder, {f"{down}.{n}": t for n, t in pack(coarse, "gptq_v2").items()})
    config = quantization_config("gptq_v2", 64) | {
        "dynamic": {"+:.*1.mlp.down_proj": {"group_size": -1}},
        "lm_head": True,
    }
    edit_json(folder / "config.json", quantization_config=config)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.packed == QuantSpec(TensorQuant(4, 64), TensorQuant(4, 64), None, TensorQuant(4, 64))
    bundle = export_bundle(folder, tmp_path / "b", quant=checkpoint.packed)
    want = expected_parameters(model.state(), bundle.spec)
    for name, got in bundle_weights(bundle).items():
        assert np.array_equal(got, want[name].numpy()), name


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_a_fused_tensor_in_chunks(kind, tmp_path):
    """MiMo-V2 stores q, k and v in one matrix, in as many chunks [Q | K | V] as there are kv heads."""
    rng = np.random.default_rng(SEED)
    config = {
        "model_type": "mimo_v2", "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "v_head_dim": 8, "hidden_act": "silu",
        "partial_rotary_factor": 0.5, "rope_theta": 1e4, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "hybrid_layer_pattern": [0], "moe_layer_freq": [0], "tie_word_embeddings": True,
        "quantization_config": quantization_config(kind, 32),
    }  # fmt: skip
    sizes = {"self_attn.qkv_proj": (112, 64), "self_attn.o_proj": (64, 32), "mlp.gate_proj": (96, 64),
             "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}  # fmt: skip
    linears = {n: random_linear(rng, *size, 32) for n, size in sizes.items()}
    tensors = {f"model.layers.0.{n}.{part}": t for n, w in linears.items() for part, t in pack(w, kind).items()}
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    tensors |= {f"{n}.weight": torch.ones(64) for n in norms} | {"model.embed_tokens.weight": torch.randn(40, 64)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    save_tokenizer(tmp_path, 40)
    checkpoint = open_checkpoint(tmp_path)
    w = linears["self_attn.qkv_proj"].weight().reshape(2, 56, 64)  # a chunk: 32 rows of q, 16 of k, 8 of v
    parts = [w[:, a:b].reshape(-1, 64) for a, b in itertools.pairwise((0, 32, 48, 56))]
    want = np.concatenate(parts)
    assert np.array_equal(checkpoint.source.read("layers.0.qkv"), want)
    for start, stop in ((0, 112), (30, 70), (63, 111)):
        ready = checkpoint.source.ready("layers.0.qkv", TensorQuant(4, 32), start, stop)
        assert np.array_equal(dequantize(*map(torch.from_numpy, ready), 4).numpy(), want[start:stop])
