"""The table of the parity suite, printed behind the tests."""

import pytest
from parity_backends import BACKENDS
from parity_judge import Table

TABLE = pytest.StashKey[Table]()


def pytest_configure(config):
    config.stash[TABLE] = Table()


@pytest.fixture(scope="session")
def table(request) -> Table:
    return request.config.stash[TABLE]


def pytest_terminal_summary(terminalreporter, config):
    if lines := config.stash[TABLE].lines(BACKENDS):
        terminalreporter.section("parity with the oracle")
        for line in lines:
            terminalreporter.line(line)
