"""Replies of the built-in model to schemas of many kinds; scripts/check_schemas.py does it for a public collection."""

import json

import jsonschema
import pytest

from mimo_edge import Engine, SamplingParams
from mimo_edge.bundle import BUILT_IN

XY = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x", "y"]}
SCHEMAS = {
    "action": {
        "type": "object",
        "properties": {"action": {"enum": ["pick_up", "place", "stop"]}, "object": {"type": "string", "maxLength": 20}},
        "required": ["action", "object"],
        "additionalProperties": False,
    },
    "const": {"const": {"action": "stop", "why": ["person", "near"]}},
    "enum of kinds": {"enum": [None, True, 3.5, "three", [1, 2]]},
    "integer range": {"type": "integer", "minimum": -40, "exclusiveMaximum": 125},
    "number range": {"type": "number", "minimum": 0, "maximum": 1.5},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500},
    "pattern": {"type": "string", "pattern": "^(kitchen|hall)_[0-9]{2}$"},
    "length": {"type": "string", "minLength": 3, "maxLength": 9},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "address": {"type": "string", "format": "ipv4"},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 5}, {"type": "integer"}],
        "items": False,
    },
    "either": {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"enum": ["left", "right"]}]},
    "both": {"allOf": [{"type": "integer", "minimum": 10}, {"type": "integer", "maximum": 20}]},
    "optional": {"type": "object", "properties": {"speed": {"enum": [1, 2, 3]}}, "additionalProperties": False},
    "map": {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "minProperties": 1,
        "maxProperties": 2,
    },
    "nested": {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/point"}, "via": {"type": "array", "items": {"$ref": "#/$defs/point"}}},
        "required": ["to"],
        "$defs": {"point": {**XY, "additionalProperties": False}},
        "additionalProperties": False,
    },
    "tree": {
        "type": "object",
        "properties": {"step": {"enum": ["go", "look"]}, "then": {"$ref": "#"}},
        "required": ["step"],
        "additionalProperties": False,
    },
    "several types": {"type": ["null", "boolean", "string"], "maxLength": 6},
}
assert len(SCHEMAS) >= 20


@pytest.fixture(scope="module")
def engine():
    with Engine.open(BUILT_IN, "onnxruntime", max_context=256) as engine:
        yield engine


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.2, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_completed_replies_validate(engine, name, sampling):
    prompt = engine.text.encode_chat([{"role": "user", "content": "pick up the red cup"}])
    generation = engine.generate(prompt, schema=SCHEMAS[name], sampling=sampling, max_tokens=48)
    text = "".join(generation)
    if generation.result.finish_reason == "stop":
        validator = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.FormatChecker())
        validator.validate(json.loads(text))
    else:
        assert generation.result.finish_reason == "length" and len(generation.result.tokens) == 48


def test_the_models_own_action_keeps_its_form_and_words(engine):
    """What the model says anyway is not changed by a schema that allows it."""
    prompt = engine.text.encode_chat([{"role": "user", "content": "pick up the red cup"}])
    free, bound = ("".join(engine.generate(prompt, **options)) for options in ({}, {"schema": SCHEMAS["action"]}))
    assert free.splitlines()[0] == bound == '{"action":"pick_up","object":"red cup"}'
