"""Golden tokens: what the exporter writes, and that a bundle which answers otherwise fails."""

import json
from dataclasses import replace

import numpy as np
import pytest
from cuda_bundle import fake_cuda, write_cuda_bundle
from specs import gemma_spec, mimo_spec, qwen_spec
from tiny_bundle import write_bundle

from mimo_edge import selftest
from mimo_edge.backends import registry
from mimo_edge.backends.cuda import CudaBackend
from mimo_edge.bundle import Bundle, BundleWriter
from mimo_edge.cli.main import main
from mimo_edge.errors import BadInputError
from mimo_edge.export import golden as golden_export
from mimo_edge.export.golden import add_golden
from mimo_edge.golden import SELFTEST, Golden


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    return add_golden(write_bundle(folder / "plain", mimo_spec(gate=True)), folder / "b")


def changed(bundle, out, change):
    """The bundle with another selftest.json."""
    with BundleWriter(out) as writer:
        for name in bundle.manifest.files:
            writer.path(name).write_bytes(bundle.file(name).read_bytes())
        data = json.loads(bundle.file(SELFTEST).read_text())
        change(data)
        writer.path(SELFTEST).write_text(json.dumps(data))
        return writer.finish(bundle.spec, "cpu", "changed").path


@pytest.mark.parametrize("backend", ["onnxruntime", "onnxruntime-float"])
def test_a_bundle_says_what_its_reference_said(bundle, backend):
    result = selftest.run(bundle.path, backend)
    assert result.passed and sum(c.compared for c in result.cases) > 50
    golden = Golden.read(bundle.file(SELFTEST))
    assert any(c.chat for c in golden.cases) and any(not c.chat for c in golden.cases)
    assert golden.dumps() == bundle.file(SELFTEST).read_text()


def last_case_only(monkeypatch, made):
    golden = Golden.read(made.file(SELFTEST))
    monkeypatch.setattr(Golden, "read", staticmethod(lambda path: replace(golden, cases=golden.cases[-1:])))


def test_golden_tokens_are_the_reference_s_with_a_tied_head_too(tmp_path, monkeypatch):
    made = add_golden(write_bundle(tmp_path / "plain", gemma_spec()), tmp_path / "b")
    last_case_only(monkeypatch, made)
    assert selftest.run(made.path, "reference").passed


def test_the_cuda_backend_is_tested_too(tmp_path, monkeypatch):
    monkeypatch.setattr(golden_export, "TEXTS", ("ab",))  # kernels are interpreted: seconds a step
    monkeypatch.setattr(golden_export, "MESSAGES", ())
    made = add_golden(write_cuda_bundle(tmp_path / "plain", qwen_spec(1)), tmp_path / "b")
    monkeypatch.setattr(registry, "load", lambda name, b: CudaBackend.open(b, api=fake_cuda(b)))
    result = selftest.run(made.path, "cuda")
    assert result.passed and [c.compared for c in result.cases] == [3]


@pytest.mark.parametrize("case", [0, -1])
def test_one_wrong_token_fails(bundle, case, tmp_path):
    def change(data):
        c = data["cases"][case]
        c["best"][-1], c["margin"][-1] = (c["best"][-1] + 1) % 258, 9.0

    result = selftest.run(changed(bundle, tmp_path / "b", change), "onnxruntime-float")
    wrong = [c.wrong for c in result.cases]
    assert not result.passed and wrong[case] and sum(map(len, wrong)) == 1


def test_a_tie_may_go_either_way_but_not_too_many(bundle, tmp_path):
    def one(data):
        c = data["cases"][0]
        c["best"][-1], c["margin"][-1] = (c["best"][-1] + 1) % 258, 0.01

    result = selftest.run(changed(bundle, tmp_path / "one", one), "onnxruntime-float")
    assert result.passed and sum(c.ties for c in result.cases) >= 1

    def many(data):
        for c in data["cases"]:
            c["best"] = [(b + 1) % 258 for b in c["best"]]
            c["margin"] = [0.01] * len(c["margin"])

    assert not selftest.run(changed(bundle, tmp_path / "many", many), "onnxruntime-float").passed


def test_whatever_cannot_be_compared_is_wrong(bundle, tmp_path, monkeypatch):
    def text(data):
        data["cases"][0]["text"] += "!"

    result = selftest.run(changed(bundle, tmp_path / "text", text), "onnxruntime-float")
    assert not result.passed and "splits the text otherwise" in result.cases[0].note

    class Broken:
        name = "broken"

        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def run(self, steps):
            outputs = self.inner.run(steps)
            outputs[0].logits[:] = np.nan
            return outputs

    load = registry.load
    monkeypatch.setattr(registry, "load", lambda name, b: Broken(load(name, b)))
    result = selftest.run(bundle.path, "onnxruntime-float")
    assert not result.passed and all(len(c.wrong) == c.compared for c in result.cases)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=2), "format 2, this version reads 1"),
        (lambda d: d.update(cases=[]), "has no cases"),
        (lambda d: d["cases"][0]["best"].pop(), "a case is not whole"),
        (lambda d: d["cases"][0]["margin"].__setitem__(0, -1.0), "a case is not whole"),
        (lambda d: d.update(more=1), "unknown key 'more'"),
    ],
)
def test_a_selftest_that_tests_less_than_it_seems_to_is_refused(bundle, change, message, tmp_path):
    with pytest.raises(BadInputError, match=message):
        selftest.run(changed(bundle, tmp_path / "b", change), "onnxruntime")


def test_the_command_s_exit_codes(bundle, tmp_path, capsys):
    def run(*args):
        with pytest.raises(SystemExit) as e:
            main(["selftest", *map(str, args)])
        done = capsys.readouterr()
        return e.value.code or 0, done.out, done.err

    code, out, _ = run(bundle.path, "--backend", "onnxruntime")
    assert code == 0 and "passed on backend onnxruntime" in out
    code, out, _ = run(bundle.path, "--backend", "onnxruntime", "--json")
    assert code == 0 and json.loads(out)["passed"]
    plain = write_bundle(tmp_path / "plain", mimo_spec())
    code, out, err = run(plain.path)
    assert (code, out) == (2, "") and "has no selftest.json" in err and err.count("\n") == 1

    def wrong(data):
        data["cases"][0]["best"][-1], data["cases"][0]["margin"][-1] = 0, 9.0

    code, out, _ = run(changed(bundle, tmp_path / "wrong", wrong), "--backend", "onnxruntime")
    assert code == 1 and "FAILED" in out and "WRONG: def add" in out
    assert Bundle.open(bundle.path).has(SELFTEST)
