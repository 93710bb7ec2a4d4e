"""Folders that cannot be right: one line that names the file, tensor or field, before any weight is read."""

import json
import shutil

import pytest
import torch
import transformers as tf
from folders import edit_json, save_model, save_tokenizer
from safetensors.torch import load_file, save_file

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families import open_checkpoint

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A tiny Qwen2 in several shards."""
    folder = tmp_path_factory.mktemp("pristine")
    config = tf.Qwen2Config(vocab_size=60, hidden_size=24, intermediate_size=40, num_attention_heads=2,
                            num_key_value_heads=1, num_hidden_layers=2, eos_token_id=2)  # fmt: skip
    save_model(tf.Qwen2ForCausalLM, config, folder, shard="10KB")
    return folder


@pytest.fixture
def folder(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "model")


def shard_of(folder, name):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def change_tensor(folder, name, change):
    path = shard_of(folder, name)
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path)


def refuse(folder, error, *words):
    with pytest.raises(error) as raised:
        open_checkpoint(folder)
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def test_the_pristine_folder_opens(folder):
    assert open_checkpoint(folder).name == "model"


def test_missing_path_and_empty_folder(tmp_path):
    refuse(tmp_path / "none", BadInputError, "does not exist")
    refuse(tmp_path, BadInputError, "config.json is missing")


def test_missing_shard(folder):
    shard = shard_of(folder, UP)
    shard.unlink()
    refuse(folder, BadInputError, shard.name, "missing")


def test_truncated_shard(folder):
    shard = shard_of(folder, UP)
    data = shard.read_bytes()
    shard.write_bytes(data[:-100])
    refuse(folder, BadInputError, shard.name, "truncated")
    shard.write_bytes(data[:40])
    refuse(folder, BadInputError, shard.name, "cut off inside its header")
    shard.write_bytes(b"")
    refuse(folder, BadInputError, shard.name, "0 bytes")


def test_shard_cut_after_opening_is_an_error_not_garbage(folder):
    checkpoint = open_checkpoint(folder)
    shard = shard_of(folder, UP)
    shard.write_bytes(shard.read_bytes()[:-3000])
    with pytest.raises(BadInputError, match="ends inside the tensor"):
        for i in range(2):
            checkpoint.source.read(f"layers.{i}.gate_up")
            checkpoint.source.read(f"layers.{i}.down")


def test_extra_shard_and_missing_index(folder):
    shutil.copy(shard_of(folder, UP), folder / "model-00099-of-00099.safetensors")
    refuse(folder, BadInputError, "model-00099-of-00099.safetensors", "not listed")
    (folder / "model.safetensors.index.json").unlink()
    refuse(folder, BadInputError, "expected model.safetensors, or shards with model.safetensors.index.json")


def test_index_and_shards_disagree(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = {**index["weight_map"], UP: index["weight_map"]["model.norm.weight"]}
    if moved == index["weight_map"]:
        moved[UP] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps({"weight_map": moved}))
    refuse(folder, BadInputError, UP, "does not hold it")
    path.write_text(json.dumps({"weight_map": {**moved, UP: "../elsewhere.safetensors"}}))
    refuse(folder, BadInputError, "not a file name")
    path.write_text("{}")
    refuse(folder, BadInputError, "no weight_map")


def test_tensor_in_two_shards(folder):
    other = shard_of(folder, "model.embed_tokens.weight")
    assert other != shard_of(folder, UP)
    save_file(load_file(other) | {UP: torch.zeros(40, 24)}, other)
    refuse(folder, BadInputError, UP, "two shards")


def test_missing_tensor(folder):
    shard = shard_of(folder, UP)
    save_file({k: v for k, v in load_file(shard).items() if k != UP} | {"other": torch.zeros(1)}, shard)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    index.pop(UP)
    path.write_text(json.dumps({"weight_map": index}))
    refuse(folder, BadInputError, UP, "missing")
    edit_json(folder / "config.json", quantization_config={"quant_method": "fp8"})
    refuse(folder, UnsupportedError, UP, "fp8")


@pytest.mark.parametrize(
    ("dtype", "error", "name"),
    [
        (torch.float8_e4m3fn, UnsupportedError, "F8_E4M3"),
        (torch.int32, UnsupportedError, "I32"),
        (torch.uint8, UnsupportedError, "U8"),
        (torch.float64, BadInputError, "F64"),
        (torch.bool, BadInputError, "BOOL"),
    ],
)
def test_wrong_dtype(folder, dtype, error, name):
    change_tensor(folder, UP, lambda t: t.to(dtype))
    refuse(folder, error, UP, name)


@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t.T, lambda t: t[None]], ids=["short", "turned", "3d"])
def test_wrong_shape(folder, change):
    change_tensor(folder, UP, lambda t: change(t).contiguous())
    refuse(folder, BadInputError, UP, "has shape", "[40, 24]")


def test_swapped_projections_of_equal_total_are_seen(folder):
    """q and k of exchanged sizes still stack to the right number of rows."""
    q, k = (f"model.layers.0.self_attn.{n}_proj.weight" for n in "qk")
    change_tensor(folder, q, lambda t: t[:12].contiguous())
    refuse(folder, BadInputError, q)
    change_tensor(folder, k, lambda t: torch.cat([t, t]))
    refuse(folder, BadInputError, q)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_names_the_tensor_where_it_is_read(folder, value):
    change_tensor(folder, UP, lambda t: t.index_put((torch.tensor(17), torch.tensor(3)), torch.tensor(value)))
    source = open_checkpoint(folder).source
    source.read("layers.0.gate_up")
    source.read("layers.1.gate_up", 0, 40 + 17)
    source.read("layers.1.gate_up", 40 + 18, 80)
    with pytest.raises(BadInputError, match=UP):
        source.read("layers.1.gate_up", 40 + 17, 40 + 18)


def test_left_over_tensor_in_a_layer(folder):
    """An output bias that nobody reads would silently change the model."""
    name = "model.layers.0.self_attn.o_proj.bias"
    shard = shard_of(folder, UP)
    save_file(load_file(shard) | {name: torch.zeros(24)}, shard)
    refuse(folder, UnsupportedError, name, "no place")


def test_more_layers_on_disk_than_in_the_config(folder):
    edit_json(folder / "config.json", num_hidden_layers=1, layer_types=["full_attention"])
    refuse(folder, UnsupportedError, "model.layers.1.", "with 1 layers")


def test_broken_header_entry(folder):
    path = folder / "model.safetensors"
    for p in folder.glob("model*"):
        p.unlink()
    for entry in ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}, {"dtype": "F32"}, 7):
        header = json.dumps({"x": entry}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        refuse(folder, BadInputError, "model.safetensors", "x")
    path.write_bytes((5).to_bytes(8, "little") + b"nojso" + bytes(16))
    refuse(folder, BadInputError, "not a JSON object")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_type": "phi9"}, UnsupportedError, "unknown model_type 'phi9' (known: gemma3, gemma3_text, llama"),
        ({"model_type": None}, BadInputError, "no model_type"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4}}, UnsupportedError, "'yarn'"),
        ({"rope_parameters": None}, BadInputError, "no rope_theta"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act 'gelu'"),
        ({"hidden_size": True}, BadInputError, "hidden_size True is not an integer"),
        ({"layer_types": ["full_attention"]}, BadInputError, "layer_types has 1 entries, expected 2"),
        ({"layer_types": ["full_attention", "linear_attention"]}, UnsupportedError, "'linear_attention'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, BadInputError, "use_sliding_window is false"),
        ({"use_sliding_window": True, "sliding_window": 9, "layer_types": None, "max_window_layers": None},
         BadInputError, "without layer_types or max_window_layers"),
        ({"use_sliding_window": True, "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
         BadInputError, "there is no sliding_window"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias True"),
        ({"num_key_value_heads": 0}, BadInputError, "sizes must be positive"),
        ({"eos_token_id": 60}, BadInputError, "eos_token_id 60 is outside the vocabulary of 60"),
        ({"eos_token_id": "</s>"}, BadInputError, "eos_token_id '</s>'"),
    ],
)  # fmt: skip
def test_config_fields(folder, change, error, words):
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", **change)
    refuse(folder, error, words)


@pytest.mark.parametrize(
    ("model_type", "change", "words"),
    [
        ("llama", {"attention_bias": True}, "attention_bias True"),
        ("llama", {"mlp_bias": True}, "mlp_bias True"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("qwen3", {"attention_bias": True}, "attention_bias True"),
        ("mimo", {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2},
         "sliding window"),
    ],
)  # fmt: skip
def test_settings_of_other_families(folder, model_type, change, words):
    edit_json(folder / "config.json", model_type=model_type, query_pre_attn_scalar=16, hidden_activation="silu",
              head_dim=12, **change)  # fmt: skip
    refuse(folder, UnsupportedError, words)


def test_gemma3_without_layer_types_or_pattern(folder):
    edit_json(folder / "config.json", model_type="gemma3_text", layer_types=None)
    refuse(folder, BadInputError, "sliding_window_pattern")


def test_config_that_is_not_json(folder):
    (folder / "config.json").write_text("{")
    refuse(folder, BadInputError, "config.json", "JSON")
    (folder / "config.json").write_text("[]")
    refuse(folder, BadInputError, "config.json", "expected an object")


def test_tokenizer(folder):
    save_tokenizer(folder, 61)
    refuse(folder, BadInputError, "'w60' the id 60", "60 entries")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    refuse(folder, BadInputError, "not a usable tokenizer")
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe")
    refuse(folder, BadInputError, "not a usable tokenizer")
    (folder / "tokenizer.json").unlink()
    refuse(folder, BadInputError, "tokenizer.json is missing", "save_pretrained")


def test_chat_templates_without_a_default(folder):
    templates = [{"name": n, "template": "x"} for n in ("rag", "tool_use")]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    refuse(folder, BadInputError, "none is named 'default'", "rag")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 10**30),
        ("num_attention_heads", 0),
        ("hidden_size", 2**40),
    ],
)
def test_impossible_sizes_are_refused_before_anything_of_that_size_is_built(folder, name, value):
    edit_json(folder / "config.json", **{name: value})
    refuse(folder, BadInputError, "impossible")


def test_a_config_nested_without_end(folder):
    (folder / "config.json").write_text("[" * 100_000)
    refuse(folder, BadInputError, "impossible values")
