"""docs/plans.md says what the planner says."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "plan_table.py"


def test_the_page_of_plans_is_not_stale():
    module = runpy.run_path(str(SCRIPT))
    assert module["PAGE"].read_text() == module["render"](), "run `python scripts/plan_table.py`"
