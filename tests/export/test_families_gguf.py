"""GGUF files: tiny ones written with the gguf library as llama.cpp's converter lays tensors out, and the real Gemma."""

import itertools

import gguf
import numpy as np
import pytest
import torch
import transformers as tf
from folders import assert_same, expected_parameters

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families import open_checkpoint
from mimo_edge.export.families.gguf_file import read_gguf
from mimo_edge.params import count, parameters
from mimo_edge.spec import RopeScaling

VOCAB = 70
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 300}  # fmt: skip
MODELS = {
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config(**SIZES, num_hidden_layers=2, tie_word_embeddings=True)),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config(**SIZES, num_hidden_layers=2, head_dim=12)),
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig(**SIZES, num_hidden_layers=2)),
    "gemma3": (tf.Gemma3ForCausalLM, tf.Gemma3TextConfig(**SIZES, num_hidden_layers=7, head_dim=20)),
}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def state_of(arch: str) -> dict[str, torch.Tensor]:
    model_class, config = MODELS[arch]
    torch.manual_seed(3)
    model = model_class(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(0, 0.2)
    return {k: v.float() for k, v in model.state_dict().items()}


def converted(arch: str, state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """What convert_hf_to_gguf.py writes: its names, Llama's q and k permuted, Gemma's norms plus one."""
    _, config = MODELS[arch]
    out = {}
    for name, value in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        array = value.numpy()
        if arch == "gemma3" and stem.endswith("norm"):
            array = array + np.float32(1)
        if arch == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            halves = array.reshape(heads, 2, len(array) // heads // 2, -1)
            array = halves.swapaxes(1, 2).reshape(array.shape)
        out[f"{prefix}{(GEMMA_NAMES if arch == 'gemma3' else NAMES)[stem]}.{kind}"] = array
    return out


def write(path, arch, tensors, *, name=None, types=None, tokens=VOCAB, skip=(), extra=None):
    """A GGUF file with a word list for a vocabulary. `types`: tensor -> quantisation; `extra`: more uint32/str keys."""
    _, config = MODELS.get(arch, MODELS["qwen2"])
    w = gguf.GGUFWriter(path, arch)
    if name:
        w.add_name(name)
    keys = {
        "block_count": config.num_hidden_layers, "context_length": 300, "embedding_length": 64,
        "feed_forward_length": 96, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 5e5,
    }  # fmt: skip
    if arch in ("qwen3", "gemma3"):
        keys |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if arch == "gemma3":
        keys["attention.sliding_window"] = 9
    keys = {f"{arch}.{k}": v for k, v in keys.items() if k not in skip} | (extra or {})
    for key, value in keys.items():
        add = {int: w.add_uint32, float: w.add_float32, str: w.add_string}[type(value)]
        add(key, value)
    w.add_tokenizer_model("llama")
    w.add_token_list(["<unk>", "<s>", "</s>"] + [f"w{i}" for i in range(tokens - 3)])
    w.add_token_scores([-float(i) for i in range(tokens)])
    w.add_token_types([2, 3, 3] + [1] * (tokens - 3))
    w.add_unk_token_id(0)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    for tensor, value in tensors.items():
        kind = (types or {}).get(tensor)
        if kind is None:
            w.add_tensor(tensor, value)
        else:
            w.add_tensor(tensor, gguf.quants.quantize(value, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.mark.parametrize("arch", MODELS)
def test_every_parameter_equals_the_model_it_was_converted_from(tmp_path, arch):
    state = state_of(arch)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", arch, converted(arch, state), name="Tiny"))
    assert_same(checkpoint, expected_parameters(state, checkpoint.spec))
    assert (checkpoint.name, checkpoint.chat_template) == ("Tiny", None)
    assert (checkpoint.spec.bos_id, checkpoint.spec.eos_ids) == (1, (2,))


def test_specs(tmp_path):
    specs = {
        arch: open_checkpoint(write(tmp_path / f"{arch}.gguf", arch, converted(arch, state_of(arch)))).spec
        for arch in MODELS
    }
    assert specs["qwen2"].tied and not specs["qwen3"].tied
    assert specs["qwen2"].attention["full"].qkv_bias and specs["qwen3"].attention["full"].qk_norm
    assert specs["llama"].attention["full"].rope_theta == 5e5
    assert specs["llama"].attention["full"].head_dim == 16
    gemma = specs["gemma3"]
    assert [layer.attention for layer in gemma.layers] == ["window"] * 5 + ["full", "window"]
    assert (gemma.attention["window"].rope_theta, gemma.attention["full"].rope_theta) == (1e4, 5e5)
    assert (gemma.attention["window"].window, gemma.embed_scale, gemma.post_norms) == (9, 8.0, True)
    assert gemma.attention["full"].scale == 20**-0.5


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "F16", "BF16"])
def test_quantised_rows_are_dequantised_block_by_block(tmp_path, kind):
    dtype = gguf.GGMLQuantizationType[kind]
    tensors = converted("llama", state_of("llama"))
    matrices = {n: dtype for n, v in tensors.items() if v.ndim == 2}
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", "llama", tensors, types=matrices))
    down = gguf.quants.dequantize(gguf.quants.quantize(tensors["blk.1.ffn_down.weight"], dtype), dtype)
    assert np.array_equal(checkpoint.source.read("layers.1.down"), down)
    assert np.array_equal(checkpoint.source.read("layers.1.down", 13, 14), down[13:14])
    for name in ("layers.0.qkv", "layers.0.gate_up"):
        whole = checkpoint.source.read(name)
        cuts = [0, 5, 6, 70, len(whole)]  # inside heads, across q, k and v
        parts = [checkpoint.source.read(name, a, b) for a, b in itertools.pairwise(cuts)]
        assert np.array_equal(np.concatenate(parts), whole)


def test_header_equals_the_librarys_reader(tmp_path):
    tensors = converted("qwen3", state_of("qwen3"))
    kinds = {"output.weight": gguf.GGMLQuantizationType.Q4_1, "token_embd.weight": gguf.GGMLQuantizationType.F16}
    path = write(tmp_path / "m.gguf", "qwen3", tensors, types=kinds)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")} == ours.metadata
    assert len(theirs.tensors) == len(ours.tensors)
    for t in theirs.tensors:
        mine = ours.tensors[t.name]
        assert (mine.dtype, mine.offset, mine.nbytes) == (t.tensor_type.name, t.data_offset, t.n_bytes)
        assert list(mine.shape) == t.shape.tolist()[::-1]


def test_linear_and_llama3_rope_scaling(tmp_path):
    llama = converted("llama", state_of("llama"))
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    spec = open_checkpoint(write(tmp_path / "a.gguf", "llama", llama, extra=linear)).spec
    assert spec.attention["full"].rope_scaling == RopeScaling("linear", 4.0)
    gemma = converted("gemma3", state_of("gemma3"))
    linear = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    attention = open_checkpoint(write(tmp_path / "g.gguf", "gemma3", gemma, extra=linear)).spec.attention
    assert (attention["full"].rope_scaling, attention["window"].rope_scaling) == (RopeScaling("linear", 8.0), None)
    parameters = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    config = tf.LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
    scaled, _ = tf.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 5e5 ** -(torch.arange(0, 16, 2) / 16)
    divisors = (plain / scaled).float().numpy()
    spec = open_checkpoint(write(tmp_path / "b.gguf", "llama", llama | {"rope_freqs.weight": divisors})).spec
    assert spec.attention["full"].rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight"):
        open_checkpoint(write(tmp_path / "c.gguf", "llama", llama | {"rope_freqs.weight": divisors[::-1].copy()}))


@pytest.mark.parametrize(
    ("arch", "options", "error", "words"),
    [
        ("phi3", {}, UnsupportedError, "unknown general.architecture 'phi3' (known: gemma3, llama, qwen2, qwen3)"),
        ("gemma3", {"skip": ["attention.sliding_window"]}, BadInputError, "no attention.sliding_window"),
        ("gemma3", {"extra": {"gemma3.final_logit_softcapping": 30.0}}, UnsupportedError, "final_logit_softcapping"),
        ("llama", {"extra": {"llama.rope.scaling.type": "yarn"}}, UnsupportedError, "rope.scaling.type 'yarn'"),
        ("llama", {"extra": {"llama.expert_count": 8}}, UnsupportedError, "expert_count 8"),
        ("llama", {"extra": {"llama.rope.dimension_count": 8}}, UnsupportedError, "rope.dimension_count"),
        ("qwen2", {"extra": {"qwen2.attention.sliding_window": 4}}, UnsupportedError, "attention.sliding_window 4"),
        ("qwen2", {"extra": {"split.count": 3}}, UnsupportedError, "llama-gguf-split --merge"),
        ("qwen2", {"skip": ["block_count"]}, BadInputError, "no block_count"),
        ("qwen2", {"tokens": VOCAB + 1}, BadInputError, f"{VOCAB + 1} tokens but the embedding has {VOCAB} rows"),
    ],
)
def test_refusals(tmp_path, arch, options, error, words):
    tensors = converted(arch, state_of(arch)) if arch in MODELS else {"token_embd.weight": np.zeros((2, 2), np.float32)}
    path = write(tmp_path / "m.gguf", arch, tensors, **options)
    with pytest.raises(error) as raised:
        open_checkpoint(path)
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda t: t.pop("blk.1.ffn_up.weight"), BadInputError, "blk.1.ffn_up.weight is missing"),
        (lambda t: t.pop("token_embd.weight"), BadInputError, "token_embd.weight is missing"),
        (lambda t: t.update({"blk.1.ffn_up.weight": np.zeros((95, 64), np.float32)}), BadInputError, "[95, 64]"),
        (lambda t: t.update({"blk.1.ffn_up.weight": np.zeros((96, 64), np.int8)}), UnsupportedError, "I8"),
        (lambda t: t.update({"blk.0.attn_output.bias": np.zeros(64, np.float32)}), UnsupportedError, "has no place"),
    ],
    ids=["missing", "no-embedding", "shape", "dtype", "left-over"],
)
def test_wrong_tensors(tmp_path, change, error, words):
    tensors = converted("qwen2", state_of("qwen2"))
    change(tensors)
    with pytest.raises(error) as raised:
        open_checkpoint(write(tmp_path / "m.gguf", "qwen2", tensors))
    assert words in str(raised.value)


def test_truncated_anywhere(tmp_path):
    """Cut at many places: in the header, in the vocabulary, in the tensor table, in the data."""
    path = write(tmp_path / "m.gguf", "qwen2", converted("qwen2", state_of("qwen2")))
    data = path.read_bytes()
    assert open_checkpoint(path)
    start = min(t.offset for t in read_gguf(path).tensors.values())
    for size in [0, 3, 20, 30, *range(40, start, 397), start, start + 5, len(data) // 2, len(data) - 33]:
        path.write_bytes(data[:size])
        with pytest.raises(BadInputError, match=r"truncated|not a GGUF file") as raised:
            open_checkpoint(path)
        assert "m.gguf" in str(raised.value)


def test_files_of_another_kind(tmp_path):
    path = tmp_path / "m.bin"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(BadInputError, match="not a GGUF file"):
        open_checkpoint(path)
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    with pytest.raises(UnsupportedError, match="version 0x3000000"):
        open_checkpoint(path)


def test_broken_scales_name_the_tensor(tmp_path):
    """A NaN in the float16 scale of one Q8_0 block."""
    tensors = converted("qwen2", state_of("qwen2"))
    name = "blk.1.ffn_down.weight"
    path = write(tmp_path / "m.gguf", "qwen2", tensors, types={name: gguf.GGMLQuantizationType.Q8_0})
    block = read_gguf(path).tensors[name].offset + 5 * 3 * 34  # row 5: three blocks of 34 bytes a row
    with path.open("r+b") as f:
        f.seek(block)
        f.write(np.float16(np.nan).tobytes())
    source = open_checkpoint(path).source
    source.read("layers.1.down", 0, 5)
    source.read("layers.1.down", 6)
    with pytest.raises(BadInputError, match=r"blk\.1\.ffn_down\.weight"):
        source.read("layers.1.down", 5, 6)


def test_real_gemma(gemma_gguf):
    checkpoint = open_checkpoint(gemma_gguf)
    spec = checkpoint.spec
    assert count(spec) == 268_098_176 and spec.tied and checkpoint.name == "Gemma 3 270m"
    assert [i for i, layer in enumerate(spec.layers) if layer.attention == "full"] == [5, 11, 17]
    assert (spec.attention["window"].window, spec.attention["window"].rope_theta) == (512, 1e4)
    assert (spec.attention["full"].rope_theta, spec.max_context, spec.hidden_size) == (1e6, 32768, 640)
    assert spec.bos_id == 2 and 1 in spec.eos_ids
    for p in parameters(spec):
        rows = checkpoint.source.read(p.name, p.shape[0] // 2, p.shape[0] // 2 + 3)
        assert rows.shape == (3, *p.shape[1:]) and np.abs(rows).max() > 0
