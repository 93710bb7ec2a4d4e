"""docs/plans.md says what the planner says."""

import runpy
from pathlib import Path

import pytest

from mimo_edge.backends.cuda_memory import place
from mimo_edge.backends.cuda_steps import pieces_of
from mimo_edge.device.footprint import Load, layout_of
from mimo_edge.export.programs import lower
from mimo_edge.export.programs.tuning import tuning

SCRIPT = Path(__file__).parents[2] / "scripts" / "plan_table.py"
MODELS = runpy.run_path(str(SCRIPT))["MODELS"]


def test_the_page_of_plans_is_not_stale():
    module = runpy.run_path(str(SCRIPT))
    assert module["PAGE"].read_text() == module["render"](), "run `python scripts/plan_table.py`"


@pytest.mark.parametrize("name", MODELS)
def test_no_single_allocation_is_one_that_an_orin_refuses(name):
    """L4T 36.4.7 refuses about 1 GiB. Whole models are made of chunks, the longest context and every head included."""
    model = runpy.run_path(str(SCRIPT))["subject"](name)
    programs = lower(model.spec, tuning("sm_87"))
    layout = layout_of(model, "cuda", Load(model.spec.max_context, heads=programs.heads))
    weights = {n: b.nbytes for n, b in programs.buffers.items() if b.role == "weight"}
    for sizes in (weights, *pieces_of(programs.with_heads(layout.heads), layout).values()):
        assert max(place(sizes)[0]) < 512 << 20
    assert programs.buffers["logits"].nbytes == 4 * model.spec.vocab_size * 4  # no row of a prompt but the last has any
