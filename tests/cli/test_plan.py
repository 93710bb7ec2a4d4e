"""mimo-edge plan: what it prints, its exit codes, and that it works without a bundle."""

import json

import pytest
from specs import qwen_spec
from tiny_bundle import write_bundle

from mimo_edge.cli.main import main
from mimo_edge.device import capacity
from mimo_edge.spec import dumps


@pytest.fixture
def command(capsys):
    def run(*args):
        with pytest.raises(SystemExit) as e:
            main(["plan", *map(str, args)])
        done = capsys.readouterr()
        return e.value.code or 0, done.out, done.err

    return run


def test_a_bundle_on_a_module(command, tmp_path):
    write_bundle(tmp_path / "b", qwen_spec())
    code, out, _ = command(tmp_path / "b", "--module", "orin-nano-8gb", "--context", 128, "--sessions", 2)
    text = " ".join(out.split())
    assert code == 0 and "tiny on Orin Nano 8 GB, backend cuda" in text and "2 x 128 tokens: fits." in text
    assert "PREDICTIONS, not measurements:" in text and "tokens/s behind 128 tokens" in text
    data = json.loads(command(tmp_path / "b", "--module", "orin-nano-8gb", "--json")[1])
    assert data["fits"] and data["largest_context"] == 256 and data["prediction"]["module"] == "orin-nano-8gb"
    assert data["total"] == sum(i["bytes"] for i in data["items"]) <= data["limit"]


def test_a_spec_that_nobody_exported_and_a_budget(command, tmp_path):
    (tmp_path / "spec.json").write_text(dumps(qwen_spec()))
    code, out, _ = command(tmp_path / "spec.json", "--module", "agx-orin-64gb", "--bits", 8)
    assert code == 0 and "not quantised yet; assumed: 8 bits in groups of 32" in " ".join(out.split())
    code, out, _ = command(tmp_path / "spec.json", "--module", "agx-orin-64gb", "--budget", "1M", "--json")
    data = json.loads(out)
    assert (
        code == 1
        and not data["fits"]
        and (data["limit"], data["largest_context"]) == (1 << 20, 0)
        and data["budget"] == 1 << 20
    )


def test_this_machine(command, monkeypatch):
    monkeypatch.setattr(capacity, "gpu_memory", lambda: None)
    code, out, _ = command("--context", 1024)
    assert code == 0 and "on this machine, backend onnxruntime" in out and "PREDICTIONS" not in out
    code, _, err = command("--backend", "cuda")
    assert code == 2 and "no GPU here to plan for: name a module" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--module", "orin"], "unknown module 'orin' (known: orin-nano-4gb"),
        (["--context", "9000"], "context 9000 is out of range (allowed: 1 to 8192)"),
        (["--bits", "4"], "is a bundle, which is quantised already"),
        (["none.gguf"], "none.gguf does not exist"),
    ],
)
def test_what_cannot_be(args, message, command):
    code, out, err = command(*args)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_run_refuses_what_a_budget_cannot_hold(capsys):
    with pytest.raises(SystemExit) as e:
        main(["run", "-p", "pick up the red cup", "--context", "1024", "--memory-budget", "120M"])
    done = capsys.readouterr()
    assert (e.value.code, done.out) == (2, "") and done.err.count("\n") == 1
    assert "more than the budget of 125.8 MB" in done.err and "weights " in done.err and "KV pages " in done.err
