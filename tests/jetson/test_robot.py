import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mimo_edge import Engine
from mimo_edge.bundle import BUILT_IN

ROBOT = Path(__file__).parents[2] / "jetson" / "examples" / "robot.py"


@pytest.fixture(scope="module")
def robot() -> Any:
    spec = importlib.util.spec_from_file_location("robot", ROBOT)
    assert spec and spec.loader
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules["robot"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["robot"]


@pytest.fixture(scope="module")
def engine():
    with Engine.open(BUILT_IN, "onnxruntime", max_context=512) as opened:
        yield opened


PATIENT = 60  # seconds: the machine may be busy


def test_a_command_becomes_an_action(robot, engine):
    made = robot.decide(engine, "pick up the red cup", PATIENT)
    assert made.ok and made.action == {"action": "pick_up", "object": "red cup"} and made.why == ""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("open the front door", "no action"),  # the model would
        ("pick up the yellow scarf", "pick_up cannot take object"),  # not in sight
    ],
)
def test_what_the_robot_cannot_do_becomes_the_fallback(robot, engine, command, words):
    made = robot.decide(engine, command, PATIENT)
    assert not made.ok and made.action == robot.FALLBACK and words in made.why


def test_late_is_no_action(robot, engine):
    made = robot.decide(engine, "pick up the red cup", 1e-6)
    assert not made.ok and made.action == robot.FALLBACK and made.why == "no action within 1e-06 s"
    assert robot.decide(engine, "stop", PATIENT).ok  # nothing is left of it


def test_a_command_that_does_not_fit_is_answered_too(robot, engine):
    made = robot.decide(engine, "go " * 5000, PATIENT)
    assert not made.ok and "context" in made.why


def test_guided_replies_are_always_actions_of_this_robot(robot, engine):
    made = robot.decide(engine, "fly to the moon", PATIENT, guided=True)
    assert made.ok and robot.validate(json.dumps(dict(made.action))) == made.action


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"action":"turn","direction":"left","degrees":90}', ""),
        ('{"action":"turn","direction":"left","degrees":181}', "cannot take degrees 181"),
        ('{"action":"turn","direction":"left","degrees":"90"}', "cannot take degrees"),
        ('{"action":"turn","direction":"left","degrees":true}', "cannot take degrees true"),
        ('{"action":"turn","direction":["left"],"degrees":90}', "cannot take direction"),
        ('{"action":"turn","direction":"left"}', "turn takes"),
        ('{"action":"stop","now":1}', "stop takes"),
        ('{"action":"unlock","door":"front_door"}', "no action"),
        ('{"action":["stop"]}', "no action"),
        ('{"stop":1}', "no action null"),
        ('["stop"]', "no action null"),
        ("Picking up the red cup.", "not JSON"),
        ("", "not JSON"),
    ],
)
def test_replies_are_checked(robot, text, words):
    if not words:
        assert robot.validate(text) == json.loads(text)
        return
    with pytest.raises(ValueError, match=words):
        robot.validate(text)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("stop\n", ("stop", 2.0)),
        ('{"command": " stop ", "deadline": 0.5}', ("stop", 0.5)),
        ('{"command": "stop", "deadline": 0}', None),
        ('{"command": "stop", "deadline": "1"}', None),
        ('{"command": ["stop"]}', None),
        ('{"deadline": 1}', None),
        ('{"command": "stop"', None),
    ],
)
def test_lines(robot, engine, line, wanted):
    if wanted is not None:
        assert robot.parse(line) == wanted
        return
    with pytest.raises(ValueError):
        robot.parse(line)
    answer = json.loads(robot.answer(engine, line))
    assert answer["ok"] is False and answer["action"] == robot.FALLBACK and answer["why"]


def test_the_service_answers_one_client_after_another_and_tells_systemd(tmp_path):
    path, notify = tmp_path / "robot.sock", tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(notify))
        systemd.settimeout(PATIENT)
        env = {**os.environ, "NOTIFY_SOCKET": str(notify)}
        command = [sys.executable, str(ROBOT), "--backend", "onnxruntime", "--context", "512", "--listen", str(path)]
        with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as service:
            try:
                assert systemd.recv(100) == b"READY=1"
                assert path.stat().st_mode & 0o007 == 0  # other users may not connect
                stop = b'{"command": "stop", "deadline": 60}\n'
                assert [a["ok"] for a in talk(path, stop + b"{\n")] == [True, False]
                assert talk(path, b"x" * 5000) == []  # too long a line ends the connection, not the service
                assert [a["action"] for a in talk(path, stop)] == [{"action": "stop"}]
            finally:
                service.terminate()
                service.wait(PATIENT)


def talk(path: Path, sent: bytes) -> list[dict[str, Any]]:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENT)
        client.connect(str(path))
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as stream:
            return [json.loads(line) for line in stream]


def test_one_command_from_a_shell():
    done = subprocess.run(
        [sys.executable, str(ROBOT), "--backend", "onnxruntime", '{"command": "go to the kitchen", "deadline": 60}'],
        capture_output=True, text=True, timeout=PATIENT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["action"] == {"action": "go_to", "room": "kitchen"}


def test_a_missing_bundle_is_one_line():
    done = subprocess.run(
        [sys.executable, str(ROBOT), "--bundle", "nowhere", "stop"], capture_output=True, text=True, timeout=PATIENT
    )
    assert done.returncode == 1 and done.stderr.startswith("robot.py: error: ") and done.stderr.count("\n") == 1
