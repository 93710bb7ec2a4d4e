"""The oracle against transformers, in float32: tiny random MiMo-V2 models and the real Gemma 3 270M."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from mimo_edge.backends import oracle
from mimo_edge.backends.base import Step
from mimo_edge.backends.reference import ReferenceBackend
from mimo_edge.export.families import open_checkpoint
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.pools import KvPools
from mimo_edge.params import parameters

PROSE = Path(__file__).parents[1] / "data" / "prose.txt"


class SourceWeights:
    """oracle.Weights over an importer's Source, every tensor read once."""

    def __init__(self, checkpoint):
        self._tensors = {p.name: torch.from_numpy(checkpoint.source.read(p.name)) for p in parameters(checkpoint.spec)}

    def get(self, name):
        return self._tensors[name]

    def rows(self, name, index):
        return self._tensors[name][index]


def error(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def tiny_mimo(folder, moe: bool):
    """A random MiMo-V2-Flash as transformers saves it, with random sinks and router biases (both start constant)."""
    layers = 6
    config = transformers.MiMoV2FlashConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=1, head_dim=24, v_head_dim=16, sliding_window=8,
        max_position_embeddings=512, n_routed_experts=4, num_experts_per_tok=2, eos_token_id=1,
        mlp_layer_types=["dense"] + ["sparse" if moe else "dense"] * (layers - 1),
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = transformers.MiMoV2FlashForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("sinks") or name.endswith("e_score_correction_bias"):
                tensor.normal_(0, 0.5)
            elif name.endswith("norm.weight"):
                tensor.normal_(1, 0.1)
            elif name.endswith("weight"):
                tensor.normal_(0, 0.2)
    model.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_byte_tokenizer())
    tokenizer.save_pretrained(folder)
    return model


def _byte_tokenizer():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({f"t{i}": i for i in range(256)}, unk_token="t0"))


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
def test_tiny_mimo_v2_equals_transformers_for_three_windows(tmp_path, moe):
    model = tiny_mimo(tmp_path, moe)
    checkpoint = open_checkpoint(tmp_path)
    spec = checkpoint.spec
    assert spec.attention["window"].window == 8
    tokens = np.random.default_rng(8).integers(0, 256, 19 + 3 * 8)
    with torch.no_grad():
        want = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    backend = ReferenceBackend(spec, SourceWeights(checkpoint))
    layout = plan_layout(spec, 64, page_size=16)
    backend.allocate(layout)
    slots, got, at = KvPools(layout).admit(len(tokens)), [], 0
    for size in [19, *[1] * 24]:  # the prompt, then three windows of stepwise decoding
        (out,) = backend.run([Step(slots, at, tokens[at : at + size], np.arange(size))])
        backend.commit([size])
        got.append(out.logits)
        at += size
    assert error(np.concatenate(got), want) < 1e-5


@pytest.fixture(scope="module")
def gemma_pair(gemma_gguf):
    """(transformers' own reading of the file, ours)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gemma_gguf.parent, gguf_file=gemma_gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), open_checkpoint(gemma_gguf)


def test_gemma_3_270m_equals_transformers_on_900_tokens_of_prose(gemma_pair):
    from tokenizers import Tokenizer

    model, checkpoint = gemma_pair
    ids = Tokenizer.from_str(checkpoint.tokenizer_json).encode(PROSE.read_text()).ids[:900]
    assert len(ids) == 900 and checkpoint.spec.attention["window"].window == 512
    tokens = torch.tensor(ids)
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
        past = [None] * len(checkpoint.spec.layers)
        got = oracle.forward(checkpoint.spec, SourceWeights(checkpoint), tokens, torch.arange(900), past).logits
    assert float(torch.linalg.norm(got - want) / torch.linalg.norm(want)) < 1e-4
    best = want.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-3
    assert clear.sum() > 850
    assert torch.equal(got.argmax(-1)[clear], want.argmax(-1)[clear])
