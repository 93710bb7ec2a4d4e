"""Folders saved by transformers: the spec says what the config said, every parameter equals the state dict."""

import math

import numpy as np
import pytest
import torch
import transformers as tf
from folders import assert_same, edit_json, expected_parameters, save_model
from safetensors.torch import load_file, save_file

from mimo_edge.backends import oracle
from mimo_edge.export.families import open_checkpoint
from mimo_edge.params import parameters
from mimo_edge.spec import LayerSpec, MoeSpec, RopeScaling

SIZES = {"vocab_size": 101, "hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 300}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 5e5}  # fmt: skip
HYBRID = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3}

MODELS = {
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config(**SIZES, num_hidden_layers=2, rope_parameters={
        "rope_type": "default", "rope_theta": 1e6})),
    "qwen2-window": (tf.Qwen2ForCausalLM, tf.Qwen2Config(**SIZES, **HYBRID, tie_word_embeddings=True)),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config(**SIZES, num_hidden_layers=2, head_dim=14)),
    "qwen3-window": (tf.Qwen3ForCausalLM, tf.Qwen3Config(**SIZES, **HYBRID, head_dim=14)),
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig(**SIZES, num_hidden_layers=2, rope_parameters=LLAMA3)),
    "llama-linear": (tf.LlamaForCausalLM, tf.LlamaConfig(**SIZES, num_hidden_layers=2, rope_parameters={
        "rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=6)),
    "mistral-full": (tf.MistralForCausalLM, tf.MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=None)),
    "gemma3": (tf.Gemma3ForCausalLM, tf.Gemma3TextConfig(**SIZES, num_hidden_layers=7, head_dim=12, sliding_window=6,
               query_pre_attn_scalar=20, rope_parameters={
                   "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                   "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})),
    "mimo-dense": (tf.MiMoV2FlashForCausalLM, tf.MiMoV2FlashConfig(**SIZES, num_hidden_layers=3, head_dim=18,
                   v_head_dim=10, sliding_window=5, mlp_layer_types=["dense"] * 3)),
    "mimo-moe": (tf.MiMoV2FlashForCausalLM, tf.MiMoV2FlashConfig(**SIZES, num_hidden_layers=3, head_dim=18,
                 v_head_dim=10, sliding_window=5, moe_intermediate_size=24, n_routed_experts=5,
                 num_experts_per_tok=2, routed_scaling_factor=1.5)),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> (folder, state), saved on first use."""
    made = {}

    def save(name):
        if name not in made:
            model_class, config = MODELS[name]
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, save_model(model_class, config, folder)
        return made[name]

    return save


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_equals_the_state_dict(saved, name):
    folder, state = saved(name)
    checkpoint = open_checkpoint(folder)
    assert_same(checkpoint, expected_parameters(state, checkpoint.spec))


class _Weights:
    def __init__(self, checkpoint):
        self.tensors = {p.name: torch.from_numpy(checkpoint.source.read(p.name)) for p in parameters(checkpoint.spec)}

    def get(self, name):
        return self.tensors[name]

    def rows(self, name, index):
        return self.tensors[name][index]


@pytest.mark.parametrize("name", MODELS)
def test_the_spec_means_what_transformers_computes(saved, name):
    """Logits of 40 tokens, several windows long; a wrong window, theta, scale or factor shows up here."""
    folder, _ = saved(name)
    model = MODELS[name][0].from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    tokens = torch.randint(0, SIZES["vocab_size"], (40,))
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
        checkpoint = open_checkpoint(folder)
        past = [None] * len(checkpoint.spec.layers)
        got = oracle.forward(checkpoint.spec, _Weights(checkpoint), tokens, torch.arange(40), past).logits
    assert (got - want).norm() / want.norm() < 2e-5


def test_mimo_spec(saved):
    spec = open_checkpoint(saved("mimo-moe")[0]).spec
    full, window = spec.attention["full"], spec.attention["window"]
    assert [layer.attention for layer in spec.layers] == ["full", "window", "window"]
    assert [layer.ffn for layer in spec.layers] == ["dense", "moe", "moe"]
    assert (full.heads, full.kv_heads, full.head_dim, full.v_head_dim, full.rotary_dim) == (4, 2, 18, 10, 6)
    assert (window.kv_heads, window.window, full.window) == (4, 5, None)
    assert (full.rope_theta, window.rope_theta) == (5e6, 1e4)
    assert (full.sinks, window.sinks) == (False, True)
    assert full.value_scale == window.value_scale == 0.707
    assert full.scale == 18**-0.5
    assert spec.ffn["moe"].moe == MoeSpec(5, 2, True, 1.5)
    assert (spec.ffn["dense"].intermediate, spec.ffn["moe"].intermediate) == (56, 24)
    assert (spec.family, spec.tied, spec.mtp, spec.norm_eps, spec.max_context) == ("mimo_v2", False, None, 1e-5, 300)


def test_gemma3_spec(saved):
    spec = open_checkpoint(saved("gemma3")[0]).spec
    full, window = spec.attention["full"], spec.attention["window"]
    assert [layer.attention for layer in spec.layers] == ["window"] * 5 + ["full", "window"]
    assert (full.rope_theta, window.rope_theta, window.window) == (1e6, 1e4, 6)
    assert (full.rope_scaling, window.rope_scaling) == (RopeScaling("linear", 8.0), None)
    assert full.scale == pytest.approx(20**-0.5) and full.qk_norm and spec.post_norms and spec.tied
    assert spec.embed_scale == math.sqrt(40)
    assert spec.ffn["dense"].activation == "gelu_tanh"
    assert (spec.bos_id, spec.eos_ids) == (2, (1,))


def test_qwen_and_llama_specs(saved):
    qwen2, qwen3 = open_checkpoint(saved("qwen2-window")[0]).spec, open_checkpoint(saved("qwen3")[0]).spec
    assert [layer.attention for layer in qwen2.layers] == ["full", "window", "window"]
    assert qwen2.attention["window"].window == 5 and qwen2.tied and qwen2.attention["full"].qkv_bias
    assert qwen3.layers == (LayerSpec("full", "dense"),) * 2
    assert qwen3.attention["full"].qk_norm and not qwen3.attention["full"].qkv_bias
    assert qwen3.attention["full"].head_dim == 14
    llama, mistral = open_checkpoint(saved("llama")[0]).spec, open_checkpoint(saved("mistral")[0]).spec
    assert llama.attention["full"].rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert llama.attention["full"].rope_theta == 5e5
    assert mistral.attention["window"].window == 6


def test_old_config_forms_give_the_same_spec(saved, tmp_path):
    """rope_theta and rope_scaling beside each other, max_window_layers without layer_types, sliding_window_pattern."""
    import shutil

    new = {n: open_checkpoint(saved(n)[0]).spec for n in ("llama", "qwen2-window", "gemma3")}
    old = {n: shutil.copytree(saved(n)[0], tmp_path / n) for n in new}
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    edit_json(old["llama"] / "config.json", rope_parameters=None, rope_theta=5e5, rope_scaling=scaling)
    edit_json(old["qwen2-window"] / "config.json", rope_parameters=None, rope_theta=10_000, layer_types=None)
    edit_json(old["gemma3"] / "config.json", rope_parameters=None, rope_theta=1e6, rope_local_base_freq=1e4,
              rope_scaling={"type": "linear", "factor": 8}, layer_types=None, sliding_window_pattern=6)  # fmt: skip
    for name, folder in old.items():
        assert open_checkpoint(folder).spec == new[name]


def test_sharded_bfloat16_folder(tmp_path):
    model_class, config = MODELS["qwen3"]
    state = save_model(lambda c: model_class(c).bfloat16(), config, tmp_path, shard="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    checkpoint = open_checkpoint(tmp_path)
    assert_same(checkpoint, expected_parameters(state, checkpoint.spec))


def test_float16_folder_with_rotary_tables(tmp_path):
    model_class, config = MODELS["llama"]
    state = save_model(lambda c: model_class(c).half(), config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(5)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert_same(checkpoint, expected_parameters(state, checkpoint.spec))


def test_gemma3_inside_the_multimodal_checkpoint(tmp_path):
    """A text_config that leaves out defaults, `language_model.` prefixes, vision tensors beside, an image token."""
    text = tf.Gemma3TextConfig(**SIZES, num_hidden_layers=6, head_dim=256, sliding_window=6)
    state = save_model(tf.Gemma3ForCausalLM, text, tmp_path)
    tensors = {f"language_model.{k}": v for k, v in state.items() if k != "lm_head.weight"}
    tensors["vision_tower.layers.0.weight"] = torch.rand(3, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "vocab_size", "sliding_window", "max_position_embeddings")  # fmt: skip
    edit_json(tmp_path / "generation_config.json", eos_token_id=[1, 100])
    (tmp_path / "config.json").write_text("{}")
    edit_json(tmp_path / "config.json", model_type="gemma3", text_config={k: getattr(text, k) for k in kept})
    token = {"id": 101, "content": "<image_soft_token>", "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}  # fmt: skip
    edit_json(tmp_path / "tokenizer.json", added_tokens=[token])
    checkpoint = open_checkpoint(tmp_path)
    assert_same(checkpoint, expected_parameters(state, checkpoint.spec))
    assert [layer.attention for layer in checkpoint.spec.layers] == ["window"] * 5 + ["full"]
    assert checkpoint.spec.eos_ids == (1, 100)
    assert "<image_soft_token>" not in checkpoint.tokenizer_json


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", "{{ one }}"),
        ("tokenizer_config.json", '{"chat_template": "{{ one }}"}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "tool_use", "template": "{{ two }}"},'
                                  ' {"name": "default", "template": "{{ one }}"}]}'),
        ("chat_template.json", '{"chat_template": "{{ one }}"}'),
    ],
)  # fmt: skip
def test_chat_template(saved, tmp_path, file, content):
    import shutil

    folder = shutil.copytree(saved("qwen2")[0], tmp_path / "m")
    assert open_checkpoint(folder).chat_template is None
    (folder / file).write_text(content)
    assert open_checkpoint(folder).chat_template == "{{ one }}"


def test_rows_outside_and_unknown_names_are_errors(saved):
    source = open_checkpoint(saved("qwen2")[0]).source
    from mimo_edge.errors import BadInputError

    with pytest.raises(BadInputError, match="embed: rows"):
        source.read("embed", 5, 102)
    with pytest.raises(BadInputError, match=r"'layers\.9\.o'"):
        source.read("layers.9.o")
    assert source.read("embed", 7, 7).shape == (0, 40)
    assert np.array_equal(source.read("embed", 90), source.read("embed")[90:])
