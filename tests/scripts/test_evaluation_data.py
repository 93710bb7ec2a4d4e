"""The shipped suite of commands is what the generator of the reference model's test set makes."""

from __future__ import annotations

import json
from random import Random

import pytest

from mimo_edge.evaluation.suites import load_suite
from scripts.reference_model.chat import messages
from scripts.reference_model.dialogue import make_sample
from scripts.reference_model.intents import frequencies


@pytest.mark.parametrize("round", [0, 9])
def test_commands_are_the_first_of_every_intent(round):
    names = frequencies()[0]
    shipped = load_suite("commands").commands[round * len(names) : (round + 1) * len(names)]
    for name, command in list(zip(names, shipped, strict=True))[::7]:
        sample = make_sample(Random(f"test:7:{name}:{round}"), "test", name)
        assert (command.group, command.action, command.reply) == (name, sample.action, sample.reply)
        assert list(command.messages) == json.loads(json.dumps(messages(sample)))
