"""What drafts lead to is distributed as the model says; scripts/check_mtp.py draws more."""

import pytest

from mimo_edge.generation import Generation
from scripts._distribution import SETTINGS, accept_what_is_likely, excess, expected, observed, table_engine

LENGTH, DRAWS = 3, 1500


@pytest.mark.parametrize("params", SETTINGS, ids=["plain", "top-k, top-p", "min-p, penalty"])
def test_continuations_have_the_exact_distribution(params):
    engine = table_engine(3)
    counts, accepted = observed(engine, params, LENGTH, DRAWS)
    assert accepted > DRAWS / 2
    assert excess(counts, expected(engine, params, LENGTH)) < 4.5


def test_a_biased_rule_is_found_out(monkeypatch):
    monkeypatch.setattr(Generation, "choose", accept_what_is_likely)
    engine = table_engine(3)
    counts, _ = observed(engine, SETTINGS[0], LENGTH, DRAWS)
    assert excess(counts, expected(engine, SETTINGS[0], LENGTH)) > 6
