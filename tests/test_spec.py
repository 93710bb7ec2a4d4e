"""ModelSpec: JSON both ways, and every mistake is an error."""

import json

import pytest
from specs import ALL, gemma_spec, mimo_spec

from mimo_edge.errors import BadInputError
from mimo_edge.params import count, parameters, stored, stored_tensors
from mimo_edge.spec import ModelSpec, QuantSpec, RopeScaling, TensorQuant, dumps


@pytest.mark.parametrize("name", ALL)
def test_json_round_trip(name):
    assert ModelSpec.from_json(json.loads(dumps(ALL[name]))) == ALL[name]


def test_json_round_trip_of_nested_optionals():
    from dataclasses import replace

    spec = mimo_spec(moe=True, mtp=3)
    full = replace(spec.attention["full"], rope_scaling=RopeScaling("llama3", 8.0))
    spec = replace(
        spec,
        attention={**spec.attention, "full": full},
        quant=QuantSpec(attention=TensorQuant(4, 32), embedding=TensorQuant(8, 128)),
        eos_ids=(1, 2),
    )
    assert ModelSpec.from_json(json.loads(dumps(spec))) == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(colour="red"), "unknown key 'colour'"),
        (lambda d: d["attention"]["window"].update(widow=3), r"attention.window: unknown key 'widow'"),
        (lambda d: d.pop("hidden_size"), "hidden_size"),
        (lambda d: d.update(hidden_size="32"), "expected int"),
        (lambda d: d.update(vocab_size=True), "expected int"),
        (lambda d: d.update(vocab_size=0), "must be positive"),
        (lambda d: d.update(layers=[]), "no layers"),
        (lambda d: d.update(norm_eps=float("nan")), "norm_eps nan"),
        (lambda d: d["attention"]["full"].update(rope_theta=0.0), "rope_theta 0.0"),
        (lambda d: d["layers"][0].update(attention="global"), "unknown attention kind 'global'"),
        (lambda d: d["ffn"]["dense"].update(activation="relu"), "'relu' .allowed: 'silu', 'gelu_tanh'"),
        (lambda d: d["attention"]["window"].update(window=0), "window 0 must be at least 1"),
        (lambda d: d["attention"]["window"].update(kv_heads=3), "do not divide"),
        (lambda d: d["attention"]["full"].update(rotary_dim=5), "rotary_dim 5"),
        (lambda d: d["quant"].update(ffn={"bits": 3, "group": 32}), "bits 4 or 8"),
        (lambda d: d["ffn"]["dense"].update(gate={"block": 24, "rank": 4}), "multiple of its block"),
    ],
)
def test_mistakes_are_one_line_errors(change, message):
    data = json.loads(dumps(mimo_spec()))
    change(data)
    with pytest.raises(BadInputError, match=message) as e:
        ModelSpec.from_json(data)
    assert "\n" not in str(e.value)


def test_a_tied_head_is_stored_only_at_another_precision():
    from dataclasses import replace

    spec = gemma_spec()
    assert "head" not in [p.name for p in parameters(spec)]
    split = replace(spec, quant=QuantSpec(embedding=TensorQuant(8, 32), head=TensorQuant(4, 32)))
    assert "head" in [p.name for p in parameters(split)]
    assert count(split) == count(spec)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("groups", [1, 3, 10])
def test_stored_bytes_of_a_quantised_tensor(bits, group, groups):
    from mimo_edge.params import Param

    n, k = 7, group * groups
    q, scales, zeros = stored(Param("x", (n, k), "ffn"), TensorQuant(bits, group))
    assert q.nbytes == n * k * bits // 8
    assert scales.nbytes == n * groups * 4
    assert zeros.nbytes == n * ((groups + 1) // 2 if bits == 4 else groups)


@pytest.mark.parametrize("name", ALL)
def test_names_are_unique(name):
    names = [s.name for s in stored_tensors(ALL[name])]
    assert len(set(names)) == len(names)
