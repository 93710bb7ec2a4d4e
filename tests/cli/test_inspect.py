"""mimo-edge inspect against sizes computed by hand."""

import json
import shutil

import pytest
from click.testing import CliRunner
from specs import mimo_spec
from tiny_bundle import write_bundle

from mimo_edge.bundle import BundleWriter
from mimo_edge.cli.common import Settings
from mimo_edge.cli.inspect import inspect, megabytes, ranges


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("inspect") / "tiny", mimo_spec(moe=True))


def output(*args):
    done = CliRunner().invoke(inspect, [str(a) for a in args], obj=Settings(), catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_json_of_a_bundle(bundle):
    facts = json.loads(output(bundle.path, "--json"))
    assert (facts["kind"], facts["name"], facts["target"]) == ("bundle", "tiny", "cpu")
    assert facts["fingerprint"] == bundle.fingerprint
    assert [g["layers"] for g in facts["layers"]] == [[0, 4], [1, 2], [3]]
    assert [g["attention"]["window"] for g in facts["layers"]] == [None, 8, 8]
    assert facts["layers"][2]["ffn"]["moe"]["experts"] == 4
    sizes = facts["bytes"]["stored"]
    assert sizes["embedding"] == 258 * (32 // 2 + 4 + 1)  # nibbles, one scale and one zero a row
    assert sizes["total"] == sum(v for k, v in sizes.items() if k != "total")
    places = (bundle.path / "weights.safetensors").stat().st_size
    assert 0 < places - sizes["total"] < 16_000  # the file's header


def test_heads_and_their_graphs(tmp_path):
    bundle = write_bundle(tmp_path / "heads", mimo_spec(mtp=3))
    facts = json.loads(output(bundle.path, "--json"))
    assert facts["mtp"]["heads"] == facts["head_graphs"] == 3
    text = " ".join(output(bundle.path).split())
    assert "3 MTP heads, attention window, feed-forward mtp" in text and "export it again" not in text
    with BundleWriter(tmp_path / "older") as writer:
        for name in bundle.manifest.files:
            if "mtp" not in name:
                shutil.copyfile(bundle.file(name), writer.path(name))
        writer.finish(bundle.spec, "cpu", "older")
    assert "the bundle has graphs of 0: export it again" in " ".join(output(tmp_path / "older").split())


def test_pools_follow_the_context(bundle):
    pools = {n: json.loads(output(bundle.path, "--json", "--context", n))["pools"] for n in (64, 128)}
    assert pools[64]["full"] == {"bytes_per_token": 2 * (12 + 8) * 4, "bytes": 64 * 2 * (12 + 8) * 4}
    assert pools[128]["full"]["bytes"] == 2 * pools[64]["full"]["bytes"]
    assert pools[64]["window"] == pools[128]["window"] == {"slots": {"window": 11}, "bytes": 3 * 11 * 2 * (12 + 8) * 4}


def test_the_table_of_a_bundle(bundle):
    text = output(bundle.path)
    for part in (
        "tiny (mimo_v2 bundle",
        "0, 4",
        "full",
        "4 x 32, best 2",
        "4 bit, groups of 32",
        "160 bytes",
        "11 slots",
    ):
        assert part in text, text


@pytest.mark.parametrize("form", ["gguf", "folder"])
def test_a_checkpoint_shows_what_4_bits_would_take(form, tmp_path, request):
    if form == "gguf":
        path, hidden, vocab = request.getfixturevalue("gemma_gguf"), 640, 262_144
    else:
        from folders import save_model
        from transformers import Qwen2Config, Qwen2ForCausalLM

        path, hidden, vocab = tmp_path, 64, 99
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
        save_model(Qwen2ForCausalLM, Qwen2Config(hidden_size=hidden, vocab_size=vocab, **sizes), path)
    facts = json.loads(output(path, "--json"))
    assert (facts["kind"], facts["fingerprint"]) == ("checkpoint", None)
    assert facts["bytes"]["float32"]["embedding"] == vocab * hidden * 4
    groups = hidden // 32
    assert facts["bytes"]["4 bit"]["embedding"] == vocab * (hidden // 2 + groups * 4 + -(-groups // 2))
    assert facts["bytes"]["4 bit"]["float"] == facts["bytes"]["float32"]["float"]
    assert "4 bit" in output(path)


def test_ranges_and_units():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8" and ranges([3]) == "3"
    assert megabytes(1_234_567) == "1.2 MB" and megabytes(1_234) == "1.2 kB"
