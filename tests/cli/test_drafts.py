"""--drafts of run and bench."""

import json

import pytest

from mimo_edge.cli.main import main


@pytest.fixture
def command(capsys):
    def run(*args):
        with pytest.raises(SystemExit) as exit:
            main(args)
        out, err = capsys.readouterr()
        return exit.value.code or 0, out, err

    return run


def test_run_reports_drafts_and_says_the_same_without(command):
    said = {}
    for drafts in ("0", "2", "auto"):
        code, out, _ = command("run", "-p", "pick up the red cup", "--drafts", drafts, "--json", "--context", "256")
        result = json.loads(out)
        said[drafts] = result["text"]
        assert code == 0 and result["mtp"]["reason"]
        if drafts == "2":
            mtp = result["mtp"]
            assert mtp["drafted_by_position"][2] == 0 < mtp["accepted"] <= mtp["drafted"]
            assert mtp["draft_share"] + mtp["verify_share"] + mtp["accept_share"] == pytest.approx(1)
    assert len(set(said.values())) == 1


@pytest.mark.parametrize("drafts", ["4", "-1", "many", "٣"])
@pytest.mark.parametrize("name", ["run", "bench"])
def test_a_wrong_number_is_refused_in_one_line(command, name, drafts):
    code, _, err = command(name, "--drafts", drafts, *(["-p", "x"] if name == "run" else []))
    assert code == 2 and err.count("\n") == 1 and "(allowed: auto, 0 to 3)" in err


def test_bench_times_the_heads(command):
    code, out, _ = command("bench", "--context", "128", "--depth", "64", "--steps", "2", "--repeats", "1")
    draft = json.loads(out.splitlines()[-1])["draft"]
    assert code == 0 and draft["heads"] == 3 and draft["tokens_to_pay"] > 1 and draft["ms"]["median"] > 0
