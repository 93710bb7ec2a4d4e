"""State machines, run in random order. MIMO_EDGE_STEPS sets the number of steps."""

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

STEPS = int(os.environ.get("MIMO_EDGE_STEPS", "2000"))
PER_RUN = 50


def run(machine, **options):
    """STEPS steps of the machine, PER_RUN a run; `options` are further settings of Hypothesis."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(1, STEPS // PER_RUN),
            stateful_step_count=PER_RUN,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            database=None,
            **options,
        ),
    )
