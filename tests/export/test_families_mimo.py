"""MiMo checkpoints that transformers cannot write: the hub form of MiMo-V2 with fused qkv and MTP, and MiMo-7B."""

import itertools

import pytest
import torch
from folders import assert_same, edit_json, write_folder
from safetensors.torch import load_file, save_file

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families import open_checkpoint
from mimo_edge.spec import MoeSpec, MtpSpec

HIDDEN, VOCAB, FFN, EXPERT = 36, 90, 44, 20
HUB = {
    "model_type": "mimo_v2", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 4,
    "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 0, 1],
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12, "v_head_dim": 10,
    "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 14, "swa_v_head_dim": 6,
    "rope_theta": 1e7, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334,
    "sliding_window": 7, "sliding_window_size": 7, "attention_chunk_size": 7,
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "attention_value_scale": 0.612,
    "attention_projection_layout": "fused_qkv", "attention_bias": False, "hidden_act": "silu",
    "intermediate_size": FFN, "moe_intermediate_size": EXPERT, "n_routed_experts": 3, "num_experts_per_tok": 2,
    "n_shared_experts": None, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": None, "hybrid_block_size": None,
    "layernorm_epsilon": 1e-6, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "num_nextn_predict_layers": 3, "eos_token_id": 5, "bos_token_id": None, "pad_token_id": 3,
    "rope_parameters": {"partial_rotary_factor": 0.334, "rope_theta": 1e7, "rope_type": "default", "type": "default"},
}  # fmt: skip
FULL, WINDOW = (8, 2, 12, 10), (8, 4, 14, 6)  # heads, kv heads, head size, value head size


class Builder:
    """Collects a checkpoint's tensors and, beside them, what the importer must give."""

    def __init__(self, seed: int):
        self.rng = torch.Generator().manual_seed(seed)
        self.tensors, self.expected = {}, {}

    def new(self, *shape):
        return torch.randn(*shape, generator=self.rng)

    def put(self, tensor, name, *shape):
        self.tensors[tensor] = self.expected[name] = self.new(*shape)

    def stack(self, name, *tensors_and_rows):
        parts = []
        for tensor, rows in tensors_and_rows:
            self.tensors[tensor] = self.new(rows, HIDDEN)
            parts.append(self.tensors[tensor])
        self.expected[name] = torch.cat(parts)

    def dense(self, prefix, name, size):
        self.stack(f"{name}.gate_up", (f"{prefix}.gate_proj.weight", size), (f"{prefix}.up_proj.weight", size))
        self.put(f"{prefix}.down_proj.weight", f"{name}.down", HIDDEN, size)

    def attention(self, prefix, name, sizes, fused: bool, chunks: int = 2):
        heads, kv, dim, v_dim = sizes
        q, k, v = self.new(heads * dim, HIDDEN), self.new(kv * dim, HIDDEN), self.new(kv * v_dim, HIDDEN)
        self.expected[f"{name}.qkv"] = torch.cat([q, k, v])
        if fused:  # [Q_0 | K_0 | V_0 | Q_1 | K_1 | V_1 ...]
            shards = zip(q.chunk(chunks), k.chunk(chunks), v.chunk(chunks), strict=True)
            self.tensors[f"{prefix}.qkv_proj.weight"] = torch.cat(list(itertools.chain(*shards)))
        else:
            self.tensors |= {f"{prefix}.{n}_proj.weight": t for n, t in zip("qkv", (q, k, v), strict=True)}
        self.put(f"{prefix}.o_proj.weight", f"{name}.o", HIDDEN, heads * v_dim)
        if sizes == WINDOW:
            self.put(f"{prefix}.attention_sink_bias", f"{name}.sinks", heads)

    def trunk(self):
        self.put("model.embed_tokens.weight", "embed", VOCAB, HIDDEN)
        self.put("model.norm.weight", "norm", HIDDEN)
        self.put("lm_head.weight", "head", VOCAB, HIDDEN)

    def norms(self, prefix, name, second):
        self.put(f"{prefix}.input_layernorm.weight", f"{name}.attn_norm", HIDDEN)
        self.put(f"{prefix}.{second}.weight", f"{name}.ffn_norm", HIDDEN)


def hub_checkpoint(fused: bool, heads: int, stacked_experts: bool = False) -> Builder:
    b = Builder(11)
    b.trunk()
    for i, window, moe in zip(range(4), HUB["hybrid_layer_pattern"], HUB["moe_layer_freq"], strict=True):
        prefix, name = f"model.layers.{i}", f"layers.{i}"
        b.norms(prefix, name, "post_attention_layernorm")
        b.attention(f"{prefix}.self_attn", name, WINDOW if window else FULL, fused)
        if not moe:
            b.dense(f"{prefix}.mlp", name, FFN)
            continue
        b.put(f"{prefix}.mlp.gate.weight", f"{name}.router", 3, HIDDEN)
        b.put(f"{prefix}.mlp.gate.e_score_correction_bias", f"{name}.router_bias", 3)
        for e in range(3):
            b.dense(f"{prefix}.mlp.experts.{e}", f"{name}.experts.{e}", EXPERT)
        if stacked_experts:
            b.tensors = {k: v for k, v in b.tensors.items() if f"{prefix}.mlp.experts." not in k}
            for part in ("gate_up", "down"):
                rows = [b.expected[f"{name}.experts.{e}.{part}"] for e in range(3)]
                b.tensors[f"{prefix}.mlp.experts.{part}_proj"] = torch.stack(rows)
    for m in range(heads):
        prefix, name = f"model.mtp.layers.{m}", f"mtp.{m}"
        b.put(f"{prefix}.enorm.weight", f"{name}.token_norm", HIDDEN)
        b.put(f"{prefix}.hnorm.weight", f"{name}.hidden_norm", HIDDEN)
        b.put(f"{prefix}.eh_proj.weight", f"{name}.proj", HIDDEN, 2 * HIDDEN)
        b.put(f"{prefix}.final_layernorm.weight", f"{name}.norm", HIDDEN)
        b.norms(prefix, f"{name}.layer", "pre_mlp_layernorm")
        b.attention(f"{prefix}.self_attn", f"{name}.layer", WINDOW, fused)
        b.dense(f"{prefix}.mlp", f"{name}.layer", FFN)
    return b


@pytest.mark.parametrize("fused", [True, False], ids=["fused-qkv", "split-qkv"])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked-experts", "experts-apart"])
def test_hub_form_with_mtp(tmp_path, fused, stacked):
    b = hub_checkpoint(fused, heads=3, stacked_experts=stacked)
    write_folder(tmp_path, HUB if fused else HUB | {"attention_projection_layout": None}, b.tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert_same(checkpoint, b.expected)
    assert checkpoint.spec.mtp == MtpSpec(3, "window", "dense", "token_first", "pre_norm", False, False)


def test_hub_form_spec(tmp_path):
    write_folder(tmp_path, HUB, hub_checkpoint(True, 3).tensors)
    spec = open_checkpoint(tmp_path).spec
    full, window = spec.attention["full"], spec.attention["window"]
    assert [layer.attention for layer in spec.layers] == ["full", "window", "window", "full"]
    assert [layer.ffn for layer in spec.layers] == ["dense", "moe", "dense", "moe"]
    assert (full.heads, full.kv_heads, full.head_dim, full.v_head_dim) == FULL
    assert (window.heads, window.kv_heads, window.head_dim, window.v_head_dim) == WINDOW
    assert (full.rotary_dim, window.rotary_dim) == (4, 4)
    assert (full.rope_theta, window.rope_theta) == (1e7, 1e4)
    assert (full.sinks, window.sinks, full.window) == (False, True, None)
    assert window.window == 7  # the hub form counts visible keys; see mimo_v2.py
    assert (full.value_scale, window.value_scale) == (0.612, 0.612)
    assert (full.scale, window.scale) == (12**-0.5, 14**-0.5)
    assert spec.ffn["moe"].moe == MoeSpec(3, 2, True, 1.0)
    assert (spec.norm_eps, spec.tied, spec.bos_id, spec.eos_ids) == (1e-6, False, None, (5,))


@pytest.mark.parametrize(
    ("says", "blocks", "heads"),
    [(3, 0, None), (0, 2, None), (2, 2, 2), (1, 3, 1), (None, 2, 2), (None, 0, None)],
)
def test_number_of_mtp_heads(tmp_path, says, blocks, heads):
    """The config's number where weights exist; as many as there are where it is silent; none without weights."""
    write_folder(tmp_path, HUB | {"num_nextn_predict_layers": says}, hub_checkpoint(True, blocks).tensors)
    mtp = open_checkpoint(tmp_path).spec.mtp
    assert (mtp and mtp.heads) == heads


def test_mtp_heads_are_not_mixed_up(tmp_path):
    write_folder(tmp_path, HUB, hub_checkpoint(True, 3).tensors)
    source = open_checkpoint(tmp_path).source
    assert len({source.read(f"mtp.{m}.layer.qkv").tobytes() for m in range(3)}) == 3


def test_missing_mtp_block_is_an_error(tmp_path):
    write_folder(tmp_path, HUB, hub_checkpoint(True, 2).tensors)
    with pytest.raises(BadInputError, match=r"model\.mtp\.layers\.2\.enorm\.weight is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hybrid_layer_pattern": None}, BadInputError, "no layer_types and no hybrid_layer_pattern"),
        ({"hybrid_layer_pattern": [0, 1, 1]}, BadInputError, "hybrid_layer_pattern has 3 entries, expected 4"),
        ({"hybrid_layer_pattern": [0, 1, 2, 0]}, BadInputError, "hybrid_layer_pattern has 2"),
        ({"layer_types": ["full_attention"] * 4}, BadInputError, "contradict"),
        ({"moe_layer_freq": None}, BadInputError, "no moe_layer_freq"),
        ({"sliding_window_size": 8}, BadInputError, r"one window size, sliding_window gives \[7, 8\]"),
        ({"sliding_window": None, "sliding_window_size": None}, BadInputError, "one window size"),
        ({"swa_num_key_value_heads": None}, BadInputError, "no swa_num_key_value_heads"),
        ({"num_attention_heads": "8"}, BadInputError, "num_attention_heads '8' is not an integer"),
        ({"n_group": 2}, UnsupportedError, "n_group 2"),
        ({"n_shared_experts": 1}, UnsupportedError, "n_shared_experts 1"),
        ({"scoring_func": "softmax"}, UnsupportedError, "scoring_func 'softmax'"),
        ({"topk_method": "greedy"}, UnsupportedError, "topk_method 'greedy'"),
        ({"hidden_act": "relu"}, UnsupportedError, "hidden_act 'relu'"),
        ({"attention_projection_layout": "other"}, UnsupportedError, "attention_projection_layout 'other'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, UnsupportedError, "yarn"),
        ({"add_swa_attention_sink_bias": False}, UnsupportedError, "attention_sink_bias .* has no place"),
    ],
)
def test_fields_that_cannot_be_right_or_represented(tmp_path, change, error, words):
    write_folder(tmp_path, HUB | change, hub_checkpoint(True, 3).tensors)
    with pytest.raises(error, match=words) as raised:
        open_checkpoint(tmp_path)
    assert "\n" not in str(raised.value)


def mimo_7b() -> tuple[dict, Builder]:
    config = {
        "model_type": "mimo", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": FFN, "hidden_act": "silu",
        "rope_theta": 640000, "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "attention_bias": True,
        "num_nextn_predict_layers": 1, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2,
        "head_dim": 12, "tie_word_embeddings": False, "eos_token_id": [4, 7],
    }  # fmt: skip
    b = Builder(13)
    b.trunk()
    for prefix, name in [*((f"model.layers.{i}", f"layers.{i}") for i in range(2)),
                         ("model.mtp_layers.0", "mtp.0.layer")]:  # fmt: skip
        b.norms(prefix, name, "post_attention_layernorm")
        b.attention(f"{prefix}.self_attn", name, (4, 2, 12, 12), fused=False)
        biases = {n: b.new(r) for n, r in (("q", 48), ("k", 24), ("v", 24))}
        b.tensors |= {f"{prefix}.self_attn.{n}_proj.bias": t for n, t in biases.items()}
        b.expected[f"{name}.qkv.bias"] = torch.cat(list(biases.values()))
        b.dense(f"{prefix}.mlp", name, FFN)
    for tensor, name in (("token_layernorm", "token_norm"), ("hidden_layernorm", "hidden_norm"),
                         ("final_layernorm", "norm")):  # fmt: skip
        b.put(f"model.mtp_layers.0.{tensor}.weight", f"mtp.0.{name}", HIDDEN)
    b.put("model.mtp_layers.0.input_proj.weight", "mtp.0.proj", HIDDEN, 2 * HIDDEN)
    return config, b


def test_mimo_7b(tmp_path):
    config, b = mimo_7b()
    write_folder(tmp_path, config, b.tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert_same(checkpoint, b.expected)
    spec = checkpoint.spec
    assert spec.mtp == MtpSpec(1, "full", "dense", order="hidden_first", zero_first=True)
    assert set(spec.attention) == {"full"} and spec.attention["full"].qkv_bias
    assert (spec.attention["full"].rope_theta, spec.eos_ids) == (640000.0, (4, 7))


def test_mimo_7b_without_its_mtp_weights(tmp_path):
    config, b = mimo_7b()
    write_folder(tmp_path, config, {k: v for k, v in b.tensors.items() if "mtp_layers" not in k})
    assert open_checkpoint(tmp_path).spec.mtp is None


def test_transformers_form_window_counts_the_query(tmp_path):
    """sliding_window is W; a sliding_window_size beside it makes transformers use that plus one."""
    import transformers as tf
    from folders import save_model

    config = tf.MiMoV2FlashConfig(vocab_size=40, hidden_size=24, intermediate_size=16, num_attention_heads=2,
                                  num_key_value_heads=1, num_hidden_layers=2, head_dim=12, v_head_dim=8,
                                  sliding_window=9, mlp_layer_types=["dense"] * 2)  # fmt: skip
    save_model(tf.MiMoV2FlashForCausalLM, config, tmp_path)
    assert open_checkpoint(tmp_path).spec.attention["window"].window == 9
    edit_json(tmp_path / "config.json", sliding_window_size=9)
    assert open_checkpoint(tmp_path).spec.attention["window"].window == 10
    assert tf.AutoConfig.from_pretrained(tmp_path).sliding_window == 10
    edit_json(tmp_path / "config.json", layer_types=None)
    with pytest.raises(BadInputError, match="no layer_types and no hybrid_layer_pattern"):
        open_checkpoint(tmp_path)


def test_sinks_under_their_name_in_memory(tmp_path):
    """self_attn.sinks instead of self_attn.attention_sink_bias."""
    b = hub_checkpoint(True, 1)
    write_folder(tmp_path, HUB | {"num_nextn_predict_layers": 1}, b.tensors)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k.replace("attention_sink_bias", "sinks"): v for k, v in tensors.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    assert_same(open_checkpoint(tmp_path), b.expected)
