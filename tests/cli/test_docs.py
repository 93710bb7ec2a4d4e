"""docs/cli.md says what --help says."""

import runpy
from pathlib import Path

GENERATOR = Path(__file__).parents[2] / "scripts" / "generate_docs.py"


def test_the_command_line_reference_is_not_stale():
    module = runpy.run_path(str(GENERATOR))
    assert module["PAGE"].read_text() == module["render"](), "run `make docs`"
