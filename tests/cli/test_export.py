"""mimo-edge export, then run: a tiny Hugging Face folder all the way to text."""

import json
import sys

import pytest
from fakes import byte_tokenizer
from folders import save_model
from transformers import Qwen2Config, Qwen2ForCausalLM

import mimo_edge.export
from mimo_edge.bundle import Bundle
from mimo_edge.cli.main import main
from mimo_edge.spec import QuantSpec, TensorQuant


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("hf")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    config = Qwen2Config(
        hidden_size=64, vocab_size=258, max_position_embeddings=128, tie_word_embeddings=False, **sizes
    )
    save_model(Qwen2ForCausalLM, config, out)
    byte_tokenizer().save(str(out / "tokenizer.json"))
    return out


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*args):
        with pytest.raises(SystemExit) as exit:
            main([str(a) for a in args])
        return exit.value.code or 0, *capsys.readouterr()

    return run


def test_export_then_run(folder, command):
    code, out, err = command("export", folder, "--target", "cpu", "-o", "b", "--bits", "8", "--max-context", "100")
    assert (code, out) == (0, "") and "wrote b: " in err and "mimo-edge run b -p" in err
    spec = Bundle.open("b").spec
    assert spec.quant == QuantSpec(*[TensorQuant(8, 32)] * 4) and spec.max_context == 100
    code, out, _ = command("run", "b", "-p", "abc", "--json", "--max-tokens", "7", "--temperature", "1")
    result = json.loads(out)
    assert code == 0 and len(result["tokens"]) == 7 and result["finish_reason"] == "length"
    code, out, err = command("export", folder, "-o", "b", "--bits", "4")
    assert code == 2 and "b exists" in err and Bundle.open("b").spec == spec


def test_coarse_groups_of_a_small_model_need_a_flag(folder, command, tmp_path):
    code, _, err = command("export", folder, "-o", "b", "--group-size", "64")
    assert code == 2 and "--allow-coarse-groups" in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())
    assert command("export", folder, "-o", "b", "--group-size", "64", "--allow-coarse-groups")[0] == 0
    assert Bundle.open("b").spec.quant.ffn == TensorQuant(4, 64)


@pytest.mark.parametrize(("option", "value"), [("--group-size", "48"), ("--bits", "3"), ("--max-context", "4096")])
def test_values_that_are_not_possible(option, value, folder, command, tmp_path):
    code, _, err = command("export", folder, "-o", "b", "--bits", "4", option, value)
    assert code == 2 and value in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_missing_extra_is_named(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(mimo_edge, "export", mimo_edge.export)  # importing it anew sets this; undone with the rest
    for name in [m for m in sys.modules if m.startswith("mimo_edge.export")]:
        monkeypatch.delitem(sys.modules, name)
    code, _, err = command("export", "x", "-o", "y")
    assert code == 3 and "export needs torch: run `pip install 'mimo-edge[export]'`" in err
