"""jetson/verify.sh: nothing is confirmed that was not looked at."""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mimo_edge.bundle import BUILT_IN
from mimo_edge.device.system import System

FOLDER = Path(__file__).parents[2] / "jetson"
MODULES = ("report", "machine", "command", "checks")
Tree = Callable[..., Path]


@pytest.fixture
def verify(monkeypatch) -> Any:
    """The modules of jetson/verify, which import each other by plain names, as attributes."""
    monkeypatch.syspath_prepend(str(FOLDER / "verify"))
    loaded = {name: importlib.import_module(name) for name in MODULES}
    yield type("Verify", (), loaded)
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture
def answers(verify, monkeypatch) -> dict[str, Any]:
    """What the sub-commands answer; those of a healthy Orin to begin with."""
    answer = verify.command.Answer
    healthy = {
        "plan": answer(
            0,
            {
                "total": 1000,
                "items": [{"bytes": 4e9}],
                "prediction": {"load_s": [1.0, 2.0], "decode_tok_s": [50.0, 60.0]},
            },
            "",
        ),
        "run": answer(0, {"timings": {"load_s": 1.5}}, ""),
        "bench": answer(0, {"decode_1": {"steps_per_s": 70.0}}, ""),
        "selftest": answer(0, {"passed": True, "cases": [{"passed": True}]}, ""),
        "doctor": answer(0, {"findings": []}, ""),
    }
    monkeypatch.setattr(verify.checks, "mimo_edge", lambda command, *_: healthy[command])
    return healthy


def test_elsewhere_it_says_what_it_could_not_check(jetson: Tree, tmp_path):
    done = subprocess.run(
        ["bash", str(FOLDER / "verify.sh"), "--root", str(jetson(**{"proc__device-tree__compatible": ""}))],
        capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False,
        env={**os.environ, "MIMO_EDGE_PYTHON": sys.executable},
    )  # fmt: skip
    report = json.loads((tmp_path / "mimo-edge-verify" / "report.json").read_text())
    assert done.returncode == any(f["status"] == "refuted" for f in report["findings"]), done.stderr
    needs_orin = [f for f in report["findings"] if f["detail"] == "this machine is not an Orin"]
    assert len(needs_orin) == 10 and {f["status"] for f in needs_orin} == {"not checked"}
    assert (
        "| not checked | tokens/s are as predicted | this machine is not an Orin |"
        in (tmp_path / "mimo-edge-verify" / "report.md").read_text()
    )


def test_what_is_no_bundle_is_refused(tmp_path):
    done = subprocess.run(
        ["bash", str(FOLDER / "verify.sh"), "--bundle", str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False,
        env={**os.environ, "MIMO_EDGE_PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 2 and "is not a bundle" in done.stderr and not list(tmp_path.iterdir())


def test_facts_of_an_orin(verify, jetson: Tree):
    facts = verify.machine.facts(System(jetson()))
    assert facts["module"] == "orin-nano-8gb-super" and facts["power mode"] == "MAXN_SUPER"
    assert (facts["L4T"], facts["JetPack"]) == ("36.4.3", "6")
    assert verify.machine.is_orin(System(jetson())) and not verify.machine.is_orin(System(Path("/nowhere")))


def test_samples_of_an_orin(verify, jetson: Tree):
    root = jetson()
    system, samples = System(root), verify.machine.Samples()
    verify.machine.sample(system, samples)
    (root / "proc/meminfo").write_text("MemTotal: 7620000 kB\nMemAvailable: 6920000 kB\n")
    (root / "proc/vmstat").write_text("pswpout 9\n")
    verify.machine.sample(system, samples)
    assert samples.taken == 100_000 * 1024 and samples.swapped == [7, 9]
    assert samples.celsius[0] == 51.5 and samples.margin[0] == 47.5
    assert samples.watts[0] == pytest.approx(11.0) and samples.gpu_mhz[0] == 306
    assert samples.over_current == [0, 0] and samples.group == [1_000_000] * 2


def test_the_monitor_sees_a_peak_between_its_ends(verify, jetson: Tree):
    root = jetson()

    def available(kilobytes: int) -> None:
        new = root / "meminfo.new"
        new.write_text(f"MemTotal: 7620000 kB\nMemAvailable: {kilobytes} kB\n")
        new.replace(root / "proc/meminfo")  # at once: the other thread reads it

    with verify.machine.Monitor(System(root)) as samples:
        available(5_900_000)
        began = time.monotonic()
        while min(samples.available) > 5_900_000 * 1024 and time.monotonic() - began < 60:
            time.sleep(0.02)
        available(7_000_000)
    assert samples.taken == (7_020_000 - 5_900_000) * 1024


def status(findings: Any) -> dict[str, str]:
    return {f.claim: f.status for f in findings}


def test_what_held_is_confirmed(verify, answers, jetson: Tree):
    checks = verify.checks
    found = status(checks.running(System(jetson()), BUILT_IN))
    assert {found[c] for c in (checks.MEMORY, checks.LOAD, checks.SPEED, checks.SWAP)} == {"confirmed"}
    assert set(found) == set(checks.RUNNING) and found[checks.GROUP] == "not checked"


def test_what_did_not_hold_is_refuted(verify, answers):
    checks, answer = verify.checks, verify.command.Answer
    slow = {
        "run": answer(0, {"timings": {"load_s": 2.5}}, ""),
        "bench": answer(0, {"decode_1": {"steps_per_s": 49.0}}, ""),
    }
    assert set(status(checks.speed(answers["plan"], slow["run"], slow["bench"])).values()) == {"refuted"}
    answers["plan"].data["items"][0]["bytes"] = 1e8  # too small for the prediction of speed to hold
    assert status(checks.speed(answers["plan"], slow["run"], slow["bench"])) == {
        checks.LOAD: "refuted",
        checks.SPEED: "observed",
    }
    samples = verify.machine.Samples(available=[5000, 3900, 4500], swapped=[7, 8], celsius=[80.0], margin=[0.0])
    samples.over_current = [0, 0]
    assert checks.memory(answers["plan"], answers["run"], samples).status == "refuted"  # 1,100 of 1,000
    assert checks.swapping(samples).status == "refuted" and checks.heat(samples).status == "refuted"
    samples.available[1] = 4000
    assert checks.memory(answers["plan"], answers["run"], samples).status == "confirmed"


def test_a_model_that_does_not_run_refutes_everything_about_running(verify, answers, jetson: Tree):
    answers["run"] = verify.command.Answer(1, {}, "no memory")
    found = list(verify.checks.running(System(jetson()), BUILT_IN))
    assert status(found) == dict.fromkeys(verify.checks.RUNNING, "refuted") and "no memory" in found[0].detail


@pytest.mark.parametrize(
    ("code", "data", "expected"),
    [
        (0, {"passed": True, "cases": [{"passed": True}]}, "confirmed"),
        (0, {}, "refuted"),  # success that says nothing
        (1, {"passed": False, "cases": [{"passed": False}]}, "refuted"),
        (1, {}, "refuted"),
        (2, {}, "not checked"),
        (3, {}, "not checked"),
    ],
)
def test_selftest_counts_only_when_it_says_so(verify, answers, code, data, expected):
    answers["selftest"] = verify.command.Answer(code, data, "why")
    [found] = verify.checks.selftest(None, ["cuda"])
    assert found.status == expected


def test_kernels_without_a_gpu_are_not_checked(verify):
    assert set(status(verify.checks.kernels(BUILT_IN)).values()) == {"not checked"}


def test_commands_run_for_real(verify):
    answer = verify.command.mimo_edge("plan", "--json")
    assert answer.data["total"] > 0
    wrong = verify.command.mimo_edge("run", "nowhere", "-p", "x")
    assert wrong.code == 2 and "nowhere" in wrong.error and not wrong.error.startswith("mimo-edge")
