"""Commands in, actions out that a robot can act on: checked, and in time or not at all.

    python robot.py "pick up the red cup"          # one command
    python robot.py < commands.txt                 # one a line
    python robot.py --listen robot.sock            # a service: lines in, lines out, over a Unix socket

A line is a command, or a JSON object {"command": "...", "deadline": 0.5}. Every line is answered by one JSON object:
    {"ok": true, "action": {"action": "pick_up", "object": "red cup"}, "seconds": 0.09, "why": ""}
    {"ok": false, "action": {"action": "stop"}, "seconds": 0.50, "why": "no action within 0.5 s"}
The model proposes and this program decides: text that is valid JSON may still be nonsense, so what is not in ACTIONS,
is not in sight, is out of bounds or is late becomes FALLBACK, which must always be safe.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mimo_edge import Engine
from mimo_edge.bundle import BUILT_IN
from mimo_edge.errors import MimoEdgeError

FALLBACK = {"action": "stop"}
DEADLINE = 2.0  # seconds; a command may bring its own
MOST_TOKENS = 64  # an action is shorter
LONGEST_LINE = 4096  # bytes of a command

ROOMS = ["kitchen", "living_room", "bedroom", "hallway", "office"]
IN_SIGHT = ["red cup", "blue book", "green bottle", "white plate"]  # a robot would ask its camera
PLACES = ["table", "shelf", "counter"]


def one_of(allowed: list[str]) -> dict[str, Any]:
    return {"enum": allowed}


def between(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


# What this robot can do, and with what, as JSON schemas. A door that the model would unlock is not in the table.
ACTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "pick_up": {"object": one_of(IN_SIGHT)},
    "place": {"object": one_of(IN_SIGHT), "place": one_of(PLACES)},
    "look_at": {"object": one_of(IN_SIGHT)},
    "go_to": {"room": one_of(ROOMS)},
    "turn": {"direction": one_of(["left", "right"]), "degrees": between(1, 180)},
    "wait": {"minutes": between(1, 10)},
    "put_down": {},
    "dock": {},
    "stop": {},
}
SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"action": {"const": name}, **arguments},
            "required": ["action", *arguments],
            "additionalProperties": False,
        }
        for name, arguments in ACTIONS.items()
    ]
}


@dataclass(frozen=True)
class Decision:
    """`action` is what the robot does: the model's when `ok`, FALLBACK otherwise, with the reason in `why`."""

    ok: bool
    action: Mapping[str, Any]
    seconds: float
    why: str = ""


def validate(text: str) -> Mapping[str, Any]:
    """The action in a reply's first line. Raises ValueError saying what is wrong with it."""
    try:
        action = json.loads(text)
    except ValueError:
        raise ValueError("the reply is not JSON") from None
    name = action.get("action") if isinstance(action, dict) else None
    if not isinstance(name, str) or name not in ACTIONS:
        raise ValueError(f"this robot has no action {json.dumps(name)}")
    arguments = {key: value for key, value in action.items() if key != "action"}
    if arguments.keys() != ACTIONS[name].keys():
        raise ValueError(f"{name} takes {sorted(ACTIONS[name])}, not {sorted(arguments)}")
    for key, schema in ACTIONS[name].items():
        if not allows(schema, arguments[key]):
            raise ValueError(f"{name} cannot take {key} {json.dumps(arguments[key], ensure_ascii=False)}")
    return action


def allows(schema: Mapping[str, Any], value: Any) -> bool:
    """The two kinds of schema in ACTIONS."""
    if "enum" in schema:
        return value in schema["enum"]
    return type(value) is int and schema["minimum"] <= value <= schema["maximum"]


def decide(engine: Engine, command: str, deadline: float = DEADLINE, guided: bool = False) -> Decision:
    """What to do about a command, `deadline` seconds from now at the latest (one engine step later, at worst).

    `guided` lets the model write nothing but what SCHEMA allows. Then a command that the robot cannot carry out
    becomes the action that the model finds nearest, which is why it is off unless asked for.
    """
    began = time.perf_counter()
    how: dict[str, Any] = {"schema": SCHEMA} if guided else {"stop": "\n"}

    def decision(why: str, action: Mapping[str, Any] = FALLBACK) -> Decision:
        return Decision(not why, action, round(time.perf_counter() - began, 3), why)

    try:
        # each command stands alone; a robot that is corrected ("no, the other one") would keep the session
        with engine.session() as session:
            reply = session.chat(command, max_tokens=MOST_TOKENS, deadline=deadline, **how)
            text = "".join(reply)
            reason = reply.result.finish_reason
    except MimoEdgeError as e:  # too long a command, no memory: nothing that should stop the robot's program
        return decision(str(e))
    if reason == "deadline" or time.perf_counter() - began > deadline:
        return decision(f"no action within {deadline:g} s")
    try:
        return decision("", validate(text))
    except ValueError as e:
        return decision(str(e))


def parse(line: str) -> tuple[str, float]:
    """(command, deadline in seconds) of a line. Raises ValueError saying what is wrong with it."""
    if not line.lstrip().startswith("{"):
        return line.strip(), DEADLINE
    try:
        given = json.loads(line)
    except ValueError:
        raise ValueError("the line begins like JSON and is not") from None
    command, deadline = given.get("command"), given.get("deadline", DEADLINE)
    if not isinstance(command, str) or not isinstance(deadline, (int, float)) or not 0 < deadline <= 60:
        raise ValueError('a line needs "command", a text, and may have "deadline", seconds above 0 and at most 60')
    return command.strip(), float(deadline)


def answer(engine: Engine, line: str, guided: bool = False) -> str:
    """The JSON line for a line of input."""
    try:
        command, deadline = parse(line)
        if not command:
            raise ValueError("the line is empty")
        made = decide(engine, command, deadline, guided)
    except ValueError as e:
        made = Decision(False, FALLBACK, 0.0, str(e))
    return json.dumps(asdict(made), ensure_ascii=False)


def tell_systemd(state: str) -> None:
    """sd_notify(3): under a unit of Type=notify, that the model is loaded; anywhere else nothing."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.sendto(state.encode(), address.replace("@", "\0", 1) if address.startswith("@") else address)


def listen(engine: Engine, path: Path, guided: bool) -> None:
    """Serves one client after another until the process is ended. Only this user and its group may connect."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        os.umask(0o007)
        server.bind(str(path))
        server.listen()
        tell_systemd("READY=1")
        while True:
            client, _ = server.accept()
            with client:
                serve(engine, client, guided)


def serve(engine: Engine, client: socket.socket, guided: bool) -> None:
    try:
        for line in lines(client):
            client.sendall(answer(engine, line, guided).encode() + b"\n")
    except OSError:  # the client went away: the next one is waiting
        pass


def lines(client: socket.socket) -> Iterator[str]:
    """What the client sends, line by line; ends with the connection or at a line that is too long."""
    with client.makefile("rb") as stream:
        while (line := stream.readline(LONGEST_LINE)).endswith(b"\n"):
            yield line.decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description="Commands in, checked actions out.")
    parser.add_argument("command", nargs="?", help="without it, lines from stdin")
    parser.add_argument("--bundle", default=os.environ.get("BUNDLE") or BUILT_IN, help="default: the built-in model")
    parser.add_argument("--backend", default=os.environ.get("BACKEND") or "auto")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a command, its prompt and its reply")
    parser.add_argument("--guided", action="store_true", help="no other text than an action; pip install llguidance")
    parser.add_argument("--listen", type=Path, metavar="SOCKET", help="serve a Unix socket")
    options = parser.parse_args()
    try:
        with Engine.open(options.bundle, options.backend, max_context=options.context) as engine:
            decide(engine, "stop", 60, options.guided)  # the first reply pays for page faults and lazy set-up
            if options.listen:
                listen(engine, options.listen, options.guided)
            for line in [options.command] if options.command else sys.stdin:
                print(answer(engine, line, options.guided), flush=True)
    except MimoEdgeError as e:
        sys.exit(f"robot.py: error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
