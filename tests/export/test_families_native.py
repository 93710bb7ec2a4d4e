"""Native folders: written shards come back as they are, and what does not fit the spec is refused by name."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import byte_tokenizer
from safetensors.torch import load_file, save_file
from specs import mimo_spec

from mimo_edge import params
from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families import open_checkpoint
from mimo_edge.spec import QuantSpec, TensorQuant, dumps

INDEX = "model.safetensors.index.json"


@pytest.fixture
def written(tmp_path):
    """(folder, spec, tensors): two bfloat16 shards of a gated model with heads."""
    spec = replace(mimo_spec(gate=True, mtp=3), vocab_size=258)
    torch.manual_seed(11)
    tensors = {p.name: torch.randn(p.shape).bfloat16() for p in params.parameters(spec)}
    names = list(tensors)
    index = {}
    for i, part in enumerate((names[:20], names[20:]), start=1):
        shard = f"model-{i:05}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, tmp_path / shard)
        index |= dict.fromkeys(part, shard)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    (tmp_path / "spec.json").write_text(dumps(spec))
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path, spec, tensors


def test_every_parameter_comes_back(written):
    folder, spec, tensors = written
    c = open_checkpoint(folder)
    assert c.spec == spec and c.chat_template == "{{ messages }}"
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(c.source.read(name), tensor.float().numpy())
    rows = c.source.read("layers.2.gate_up", 3, 71)
    np.testing.assert_array_equal(rows, tensors["layers.2.gate_up"][3:71].float().numpy())


def change(folder, name, value):
    """Replaces tensor `name` (None: removes it) in the shard that holds it."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    path = folder / weight_map[name]
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors | ({} if value is None else {name: value}), path)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, ("layers.1.sinks",)),
        (torch.ones(5), ("layers.1.sinks", "[5]", "[4]")),
        (torch.ones(4, dtype=torch.float64), ("layers.1.sinks", "F64")),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_a_tensor_that_does_not_fit(written, value, words):
    folder, *_ = written
    change(folder, "layers.1.sinks", value)
    with pytest.raises(BadInputError) as raised:
        open_checkpoint(folder)
    assert all(w in str(raised.value) for w in words) and "\n" not in str(raised.value)


def test_a_tensor_without_a_place(written):
    folder, *_ = written
    spec_data = json.loads((folder / "spec.json").read_text())
    spec_data["mtp"] = None
    (folder / "spec.json").write_text(json.dumps(spec_data))
    with pytest.raises(UnsupportedError, match=r"mtp\.0"):
        open_checkpoint(folder)


def test_not_a_number_is_named(written):
    folder, *_ = written
    change(folder, "norm", torch.full((32,), float("nan")))
    with pytest.raises(BadInputError, match="norm"):
        open_checkpoint(folder).source.read("norm")


def test_spec_that_is_broken_or_quantised(written):
    folder, spec, _ = written
    (folder / "spec.json").write_text(dumps(replace(spec, quant=QuantSpec(ffn=TensorQuant(4, 32)))))
    with pytest.raises(BadInputError, match="quant must be empty"):
        open_checkpoint(folder)
    (folder / "spec.json").write_text("{}")
    with pytest.raises(BadInputError, match="spec"):
        open_checkpoint(folder)
