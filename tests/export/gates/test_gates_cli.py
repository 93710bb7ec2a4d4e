"""mimo-edge export with gates: options go through, and those that cannot be are refused in one line."""

import pytest

from mimo_edge.cli.main import main
from mimo_edge.export import pipeline
from mimo_edge.export.gates import GateRequest


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*args):
        with pytest.raises(SystemExit) as exit:
            main(["export", "src", "-o", "b", *args])
        return exit.value.code or 0, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("args", "request_"),
    [
        (["--gates", "32", "--skip", "0.2"], GateRequest(32, skip=0.2)),
        (["--gates", "16", "--gate-loss", "0.05"], GateRequest(16, max_loss=0.05)),
        ([], None),
    ],
)
def test_options_reach_the_export(args, request_, command, monkeypatch):
    seen = {}

    def export_bundle(src, out, **options):
        seen.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "export_bundle", export_bundle)
    assert command("--calib", "text.jsonl", *args)[0] == 130
    assert seen.get("gates") == request_ and seen["calib"] == "text.jsonl"
    assert not {"skip", "gate_loss"} & set(seen)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--skip", "0.2"], "give --gates 32 too"),
        (["--gate-loss", "0.2"], "give --gates 32 too"),
        (["--gates", "24", "--skip", "0.2"], "'24' is not one of"),
        (["--gates", "32"], "say how much to skip"),
        (["--gates", "32", "--skip", "0.2", "--gate-loss", "0.1"], "say how much to skip"),
        (["--gates", "32", "--skip", "1.5"], "--skip 1.5: a share of feed-forward work, above 0 and at most 0.8"),
        (["--gates", "32", "--skip", "lots"], "'lots' is not a valid float"),
    ],
)
def test_options_that_cannot_be(args, message, command, tmp_path):
    code, err = command(*args)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())
