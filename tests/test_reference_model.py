"""The built-in model: there right after installation, answers commands, small enough to ship."""

import json

import pytest

from mimo_edge import Engine
from mimo_edge.bundle import BUILT_IN, Bundle
from mimo_edge.cli.main import main
from mimo_edge.spec import TensorQuant


def ask(engine, text):
    with engine.session() as session:
        reply = session.chat(text)
        action, spoken = "".join(reply).split("\n", 1)
    assert reply.result.finish_reason == "stop"
    return json.loads(action), spoken


@pytest.fixture(scope="module")
def engine():
    with Engine.open(BUILT_IN, threads=2) as engine:
        yield engine


def test_it_is_whole_small_and_four_bits():
    bundle = Bundle.open(BUILT_IN)
    assert sum(f.bytes for f in bundle.manifest.files.values()) < 25e6
    four = TensorQuant(4, 32)
    assert all(bundle.spec.quant.of(kind) == four for kind in ("attention", "ffn", "embedding", "head"))
    assert bundle.spec.mtp.heads == 3 and bundle.spec.ffn["dense"].gate


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("pick up the red cup", {"action": "pick_up", "object": "red cup"}),
        ("turn on the kitchen light", {"action": "light_on", "room": "kitchen"}),
    ],
)
def test_commands_become_actions(engine, text, action):
    got, spoken = ask(engine, text)
    assert got == action and spoken.strip()


def test_the_command_needs_no_bundle(capfdbinary):
    with pytest.raises(SystemExit) as e:
        main(["run", "-p", "pick up the red cup", "--json"])
    result = json.loads(capfdbinary.readouterr().out)
    assert not e.value.code and json.loads(result["text"].split("\n")[0])["action"] == "pick_up"


def test_a_conversation_reuses_what_it_has_read(engine):
    with engine.session() as session:
        first = session.chat("turn on the kitchen light")
        list(first)
        second = session.chat("and now turn it off")
        list(second)
    assert first.result.cache.reused_tokens == 0
    assert second.result.cache.reused_tokens > first.result.cache.prompt_tokens
