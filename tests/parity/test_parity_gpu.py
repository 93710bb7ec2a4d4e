"""Models x backends x scenarios on a GPU, each compared with the oracle: docs/parity.md."""

import functools

import pytest
from _parity import ORIN
from parity_backends import BACKENDS, capability
from parity_models import MODELS, make
from parity_scenarios import SCENARIOS
from parity_suite import Missing, Suite

from mimo_edge.errors import UnsupportedError


@pytest.fixture(scope="session")
def suite(tmp_path_factory):
    try:
        own = capability()
    except UnsupportedError as e:
        pytest.skip(f"needs an NVIDIA GPU: {e}")
    make_model = functools.partial(make, capabilities=sorted({ORIN, own}))
    suite = Suite(tmp_path_factory.mktemp("parity"), make_model, BACKENDS)
    yield suite
    suite.close()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("model", MODELS)
def test_equals_the_oracle(model, scenario, backend, suite, table):
    try:
        cell = suite.cell(model, scenario, backend)
    except Missing as e:
        table.skip(model, scenario, backend, *e.args)
        pytest.skip(": ".join(e.args))
    except BaseException as e:
        table.put(model, scenario, backend, f"FAILED: {type(e).__name__}")
        raise
    table.put(model, scenario, backend, cell)
    assert cell.good, cell
