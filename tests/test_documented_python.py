"""The Python of docs/python.md and docs/structured.md runs as it is, in the order of the page."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(("page", "said"), [("python.md", '"object":"red cup"'), ("structured.md", '{"room":"')])
def test_examples_run(page, said, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    names = {"__name__": "example"}
    for block in blocks:
        patient = block.replace("deadline=2.0", "deadline=600.0")  # for a machine that does much else
        exec(compile(patient, page, "exec"), names)
    assert said in capsys.readouterr().out
