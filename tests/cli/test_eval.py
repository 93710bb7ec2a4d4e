"""mimo-edge eval from the outside."""

from __future__ import annotations

import json
import sys

import pytest
from specs import mimo_spec
from tiny_bundle import write_bundle

from mimo_edge.cli.main import main
from mimo_edge.evaluation import evaluate as evaluating


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    spec = mimo_spec(gate=True, mtp=2)
    return str(write_bundle(tmp_path_factory.mktemp("eval") / "tiny", spec, template="{{ messages[-1].content }}").path)


@pytest.fixture
def suite(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluating, "LONGEST_REPLY", 8)
    monkeypatch.setattr(evaluating, "CONTINUATION", 8)
    path = tmp_path / "mine.jsonl"
    chat = [{"role": "user", "content": "go on"}]
    lines = [{"messages": chat, "action": "{}", "reply": "ok", "intent": i} for i in ("left", "right")]
    path.write_text("\n".join(map(json.dumps, [*lines, {"text": "A short text to score."}])))
    return str(path)


@pytest.fixture
def command(capsys):
    def run(*args):
        with pytest.raises(SystemExit) as exit:
            main(("eval", *args))
        out, err = capsys.readouterr()
        return exit.value.code or 0, out, err

    return run


def test_a_table_names_every_figure(command, bundle, suite):
    code, out, err = command(bundle, "--suite", suite, "--threads", "1")
    assert code == 0 and "error" not in err
    for what in (
        "action exact, %", "reply exact, %", "reply ROUGE-L", "reply BLEU", "weakest: left", "perplexity",
        "MTP tokens a step, commands", "MTP tokens a step, sampled", "accepted by position",
        "blocks skipped, text rows", "skipped by layer, answer rows, %:", "2 commands", "22 tokens",
    ):  # fmt: skip
        assert what in out


def test_json_and_plot(command, bundle, suite, tmp_path):
    picture = tmp_path / "p.png"
    code, out, _ = command(bundle, "--suite", suite, "--json", "--plot", str(picture), "--limit", "1")
    found = json.loads(out)
    assert code == 0 and out.count("\n") == 1 and picture.read_bytes().startswith(b"\x89PNG")
    assert found["commands"]["count"] == 1 and found["commands"]["action"]["value"] == 0
    assert found["texts"]["perplexity"]["low"] <= found["texts"]["perplexity"]["high"]
    assert len(found["drafts"]["commands"]["by_position"]) == 2 and len(found["skipped"]["text"]) == 5


@pytest.mark.parametrize(
    ("args", "told", "code"),
    [
        (["--suite", "nothing"], "no such suite: 'nothing' (allowed: commands, perplexity, or a file", 2),
        (["--limit", "0"], "limit 0 is out of range", 2),
        (["--plot", "p.docx"], "p.docx: not an image format", 2),
        (["--plot", "nowhere/p.png"], "no folder nowhere", 2),
        (["--backend", "abacus"], "unknown backend 'abacus'", 2),
    ],
)
def test_mistakes_are_one_line_before_any_work(args, told, code, command, bundle):
    got, out, err = command(bundle, *args)
    assert (got, out) == (code, "") and err.count("\n") == 1 and told in err


def test_bad_lines_are_one_line(command, bundle, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\nnot json')
    code, out, err = command(bundle, "--suite", str(path))
    assert (code, out) == (2, "") and err.count("\n") == 1 and "line 2: not JSON" in err


def test_a_missing_library_names_the_extra(command, bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    code, _, err = command(bundle, "--limit", "1")
    assert code == 3 and "pip install 'mimo-edge[eval]'" in err and err.count("\n") == 1


def test_without_pytorch_the_rest_is_measured(command, bundle, suite, monkeypatch):
    monkeypatch.delitem(sys.modules, "mimo_edge.backends.oracle_text", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, _ = command(bundle, "--suite", suite, "--json")
    found = json.loads(out)
    assert code == 0 and found["drafts"] == found["skipped"] == {} and found["texts"]["perplexity"]["value"] > 1
    assert "pip install 'mimo-edge[export]'" in found["left_out"][0]
