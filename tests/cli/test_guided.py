"""run --schema, --regex and --grammar."""

import json

import pytest
from fakes import FakeBackend, fake_bundle, script

from mimo_edge.backends import registry
from mimo_edge.cli.main import main

SCHEMA = {
    "type": "object",
    "properties": {"go": {"type": "boolean"}},
    "required": ["go"],
    "additionalProperties": False,
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsysbinary):
    """Runs the command on a model that wants to say "true then more": (exit code, stdout, last line of stderr)."""
    loaded = []

    def load(bundle, threads):
        loaded.append(bundle)
        return FakeBackend(script("true then more", 4))

    monkeypatch.setitem(registry.LOADERS, "onnxruntime", load)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "go.lark").write_text('start: "g" "o"+ "!"\n')
    (tmp_path / "go.gbnf").write_text('root ::= "go" [a-z]\n')
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "impossible.json").write_text('{"enum": []}')
    (tmp_path / "bytes.json").write_bytes(b'{"a": "\xff"}')
    bundle = fake_bundle(tmp_path / "fake", context=128)

    def run(*options):
        with pytest.raises(SystemExit) as exit:
            main(("run", bundle, "-p", "abc", "--max-tokens", "40", *options))
        out, err = capsysbinary.readouterr()
        return exit.value.code or 0, out.decode(), err.decode().splitlines()[-1]

    run.loaded = loaded
    return run


def test_a_schema_file_gives_json_that_it_allows(run):
    code, out, _ = run("--schema", "schema.json", "--json")
    assert code == 0 and json.loads(json.loads(out)["text"]) in ({"go": True}, {"go": False})


@pytest.mark.parametrize(
    ("options", "begins"),
    [(("--regex", "t[a-z]{3}"), "true\n"), (("--grammar", "go.lark"), "go"), (("--grammar", "go.gbnf"), "go")],
)
def test_expressions_and_grammars(run, options, begins):
    code, out, _ = run(*options)
    assert code == 0 and out.startswith(begins)


@pytest.mark.parametrize(
    ("options", "message", "before_loading"),
    [
        (("--schema", "missing.json"), "missing.json: No such file", True),
        (("--schema", "."), ".: Is a directory", True),
        (("--schema", "bytes.json"), "bytes.json: not UTF-8 at byte 7", True),
        (("--schema", "bad.json"), "the schema is not JSON: Expecting property name", True),
        (("--schema", "schema.json", "--regex", "a"), "schema and regex were given", True),
        (("--schema", "impossible.json"), "the schema cannot be used: Unsatisfiable schema", False),
        (("--regex", "a("), "unclosed group", False),
        (("--grammar", "bad.json"), "the grammar cannot be used", False),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(run, options, message, before_loading):
    code, out, error = run(*options)
    assert (code, out) == (2, "") and error.startswith("mimo-edge: error: ") and message in error
    assert bool(run.loaded) != before_loading
