"""Bundles: written whole or not at all, opened only when complete and unchanged."""

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from specs import gemma_spec, mimo_spec
from tiny_bundle import write_bundle
from tiny_weights import INT4

from mimo_edge.backends.onnxruntime import FLOAT_MODEL, MODEL
from mimo_edge.bundle import CHAT_TEMPLATE, SPEC, TOKENIZER, WEIGHTS, Bundle, BundleWriter
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.params import Stored, stored_tensors
from mimo_edge.spec import QuantSpec, TensorQuant
from mimo_edge.tensors import lay_out, read_tensors

FILES = ["manifest.json", SPEC, TOKENIZER, CHAT_TEMPLATE, MODEL, FLOAT_MODEL, WEIGHTS]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("bundle") / "b", mimo_spec())


@pytest.fixture
def copied(original, tmp_path):
    return Path(shutil.copytree(original.path, tmp_path / "copy"))


def edit_manifest(folder, change, seal=True):
    """Applies `change` to the manifest and, with `seal`, makes its checksum right again."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    if seal:
        data.pop("checksum")
        data["checksum"] = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


def refused(folder, *words, **how):
    """Opening raises one line that holds all words."""
    with pytest.raises(BadInputError) as e:
        Bundle.open(folder, **how)
    assert "\n" not in str(e.value)
    for word in words:
        assert word in str(e.value), str(e.value)


# Opening


def test_round_trip(original, copied):
    for path in (copied, str(copied)):
        bundle = Bundle.open(path)
        assert (bundle.spec, bundle.manifest) == (original.spec, original.manifest)
    assert sorted(bundle.manifest.files) == sorted(set(FILES) - {"manifest.json"})
    assert bundle.chat_template == (copied / CHAT_TEMPLATE).read_text()
    assert bundle.has(WEIGHTS) and bundle.file(WEIGHTS) == copied / WEIGHTS and not bundle.has("manifest.json")
    for name, entry in bundle.manifest.files.items():
        data = (copied / name).read_bytes()
        assert (entry.bytes, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    with pytest.raises(BadInputError, match=r"has no plan\.json \(it has: .*spec\.json"):
        bundle.file("plan.json")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(name, copied):
    (copied / name).unlink()
    refused(copied, name, "export", verify=False)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file(name, copied):
    os.truncate(copied / name, (copied / name).stat().st_size - 1)
    refused(copied, name, verify=False)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere(name, copied):
    data = bytearray((copied / name).read_bytes())
    rng = np.random.default_rng()
    for at in {0, len(data) - 1, *rng.integers(0, len(data), 60).tolist()}:
        bit = 1 << int(rng.integers(8))
        data[at] ^= bit
        (copied / name).write_bytes(data)
        refused(copied, *([] if name == "manifest.json" else [name, "was changed"]))
        data[at] ^= bit
    (copied / name).write_bytes(data)
    Bundle.open(copied)


def test_without_verification_only_big_files_are_trusted(copied):
    for name in (WEIGHTS, TOKENIZER):
        data = bytearray((copied / name).read_bytes())
        data[-1] ^= 1
        (copied / name).write_bytes(data)
        if name == WEIGHTS:
            assert Bundle.open(copied, verify=False).spec
    refused(copied, TOKENIZER, verify=False)


def test_a_newer_layout_says_so(copied):
    edit_manifest(copied, lambda m: m.update(layout=2, invention={"of": "tomorrow"}), seal=False)
    refused(copied, "bundle layout 2, this version reads 1: upgrade mimo-edge")


@pytest.mark.parametrize("layout", [0, -1, "1", None, True, 1.5], ids=repr)
def test_other_layouts(layout, copied):
    edit_manifest(copied, lambda m: m.update(layout=layout))
    refused(copied, "layout" if layout is not True else "manifest")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(extra=1), ["unknown key 'extra'"]),
        (lambda m: m["files"][WEIGHTS].update(mode=7), ["unknown key 'mode'"]),
        (lambda m: m.pop("name"), ["key 'name' is missing", "mimo-edge export SRC"]),
        (lambda m: m.update(name=3), ["expected str"]),
        (lambda m: m.update(files=[]), ["expected an object"]),
        (lambda m: m["files"].pop(WEIGHTS), ["lacks weights.safetensors"]),
        (lambda m: m.update(fingerprint="0" * 64), ["fingerprint"]),
        (lambda m: m["files"].update({"../x": m["files"].pop(MODEL)}), ["'../x' leads out"]),
        (lambda m: m["files"].update({"/etc/passwd": m["files"].pop(MODEL)}), ["leads out"]),
    ],
    ids=str,
)
def test_manifests_that_are_wrong(change, words, copied):
    edit_manifest(copied, change)
    refused(copied, *words)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", "\xff", '{"layout": 1}', "7", "[" * 99_999], ids=lambda t: repr(t[:20])
)
def test_manifests_that_are_none(text, copied):
    (copied / "manifest.json").write_bytes(text.encode("latin-1"))
    refused(copied, "manifest.json")


def test_a_changed_manifest_is_found_even_when_it_makes_sense(copied):
    edit_manifest(copied, lambda m: m.update(name="another"), seal=False)
    refused(copied, "manifest.json was changed")


def test_a_spec_with_unknown_keys_is_refused_even_if_sealed(tmp_path, original):
    out = tmp_path / "b"
    with BundleWriter(out) as writer:
        shutil.copytree(original.path, writer.path("."), dirs_exist_ok=True)
        writer.path("manifest.json").unlink()
        writer.finish(original.spec, "cpu", "x")
    for quant in ({"attention": None, "bits": 4}, {"attention": {"bits": 5, "group": 32}}, {"attention": {"bits": 4}}):
        spec = json.loads((out / SPEC).read_text())
        spec["quant"] = quant
        (out / SPEC).write_text(json.dumps(spec))
        raw = (out / SPEC).read_bytes()
        entry = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}

        def seal(m, entry=entry):
            m["files"][SPEC] = entry
            parts = ["layout 1", *(f"{n} {m['files'][n]['sha256']}" for n in (SPEC, TOKENIZER, WEIGHTS))]
            m["fingerprint"] = hashlib.sha256("\n".join(parts).encode()).hexdigest()

        edit_manifest(out, seal)
        refused(out, "quant")


def test_not_a_bundle(tmp_path):
    refused(tmp_path / "nowhere", "does not exist", "mimo-edge export SRC")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "model.gguf", "is a file, not a bundle", "mimo-edge export SRC --target cpu -o DIR")
    refused(tmp_path, "folder without manifest.json", "mimo-edge export SRC")


def test_the_fingerprint_is_of_what_the_model_computes(tmp_path, original):
    same = write_bundle(tmp_path / "same", mimo_spec(), template=None)
    assert same.fingerprint == original.fingerprint and same.chat_template is None
    prints = {original.fingerprint}
    prints.add(write_bundle(tmp_path / "seed", mimo_spec(), seed=1).fingerprint)
    prints.add(write_bundle(tmp_path / "spec", replace(mimo_spec(), norm_eps=2e-5)).fingerprint)
    with BundleWriter(tmp_path / "tokenizer") as writer:
        shutil.copy(original.file(WEIGHTS), writer.path(WEIGHTS))
        writer.path(TOKENIZER).write_text("{}")
        prints.add(writer.finish(original.spec, "cpu", "tiny").fingerprint)
    assert len(prints) == 4


# Writing


def nothing_but(folder, *names):
    assert sorted(p.name for p in folder.iterdir()) == sorted(names)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, MemoryError])
def test_a_failure_leaves_nothing(error, tmp_path):
    with pytest.raises(error), BundleWriter(tmp_path / "b") as writer:
        writer.path("half").write_bytes(b"x" * 1000)
        raise error
    nothing_but(tmp_path)


def test_a_failure_in_finish_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_bundle(tmp_path / "b", mimo_spec())
    nothing_but(tmp_path)


def test_a_block_that_does_not_finish_leaves_nothing(tmp_path):
    with BundleWriter(tmp_path / "b") as writer:
        writer.path("half").write_bytes(b"x")
    nothing_but(tmp_path)


@pytest.mark.parametrize(
    "make", [Path.mkdir, Path.touch, lambda p: p.symlink_to("dangling")], ids=["dir", "file", "link"]
)
def test_an_output_that_exists_is_not_touched(make, tmp_path):
    make(tmp_path / "b")
    with pytest.raises(BadInputError, match="b exists: choose another name"):
        BundleWriter(tmp_path / "b")
    nothing_but(tmp_path, "b")


def test_an_output_that_appears_meanwhile_is_not_touched(tmp_path, original):
    out = tmp_path / "b"
    with pytest.raises(BadInputError, match="b exists"), BundleWriter(out) as writer:
        shutil.copytree(original.path, writer.path("."), dirs_exist_ok=True)
        out.mkdir()
        writer.finish(original.spec, "cpu", "x")
    nothing_but(tmp_path, "b")
    assert not list(out.iterdir())


def test_a_parent_that_is_missing(tmp_path):
    with pytest.raises(BadInputError, match="mkdir -p"):
        BundleWriter(tmp_path / "no" / "b")
    nothing_but(tmp_path)


def test_relative_paths_and_modes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old = os.umask(0o027)
    try:
        bundle = write_bundle(Path("b"), mimo_spec())
    finally:
        os.umask(old)
    assert Bundle.open("b").manifest == bundle.manifest
    assert stat.S_IMODE(Path("b").stat().st_mode) == 0o750
    nothing_but(tmp_path, "b")


def test_every_file_is_flushed_before_the_rename(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    write_bundle(tmp_path / "b", mimo_spec())
    at = events.index("rename")
    assert {Path(e).name for e in events[: at - 1]} == set(FILES)
    assert Path(events[at - 1]).name.endswith(".partial") and events[at + 1 :] == [str(tmp_path)]


def test_a_disk_without_room_is_found_before_the_first_byte(tmp_path):
    with pytest.raises(MimoEdgeError) as e, BundleWriter(tmp_path / "b") as writer:
        writer.reserve(1 << 60)
    assert e.value.exit_code == 1 and f"{1 << 60:,} bytes" in str(e.value) and "\n" not in str(e.value)
    nothing_but(tmp_path)


def test_a_disk_that_fills_up_meanwhile(tmp_path):
    with (
        pytest.raises(MimoEdgeError, match="disk full: the bundle needs 1,234 bytes"),
        BundleWriter(tmp_path / "b") as writer,
    ):
        writer.reserve(1234)
        raise OSError(errno.ENOSPC, "No space left on device")
    nothing_but(tmp_path)


def test_a_killed_writer_leaves_no_bundle(tmp_path):
    code = f"""
import sys, time
from mimo_edge.bundle import BundleWriter
with BundleWriter({str(tmp_path / "b")!r}) as writer:
    writer.path("weights.safetensors").write_bytes(b"x" * 100)
    print("ready", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        child.kill()
    assert not (tmp_path / "b").exists()
    with BundleWriter(tmp_path / "b"):
        pass  # what the killed writer left behind is in nobody's way


# The weights file


@pytest.mark.parametrize("spec", [mimo_spec(), mimo_spec(moe=True), gemma_spec()], ids=["mimo", "moe", "gemma"])
@pytest.mark.parametrize(
    "quant", [INT4, QuantSpec(None, TensorQuant(8, 32), None, TensorQuant(4, 32))], ids=["4", "mix"]
)
def test_layout_of_the_weights_file(spec, quant, tmp_path):
    spec = replace(spec, quant=quant, vocab_size=101)  # odd, so that later tensors are not aligned
    tensors = stored_tensors(spec)
    header, places = lay_out(tensors)
    assert len(header) % 64 == 0 and list(places) == [t.name for t in tensors]
    data = np.random.default_rng().integers(0, 100, sum(t.nbytes for t in tensors), dtype=np.uint8).tobytes()
    (tmp_path / "w").write_bytes(header + data)
    arrays, expected = read_tensors(tmp_path / "w"), load_file(tmp_path / "w")
    assert list(arrays) == list(places)
    for t in tensors:
        place, array = places[t.name], arrays[t.name]
        assert (place.dtype, place.shape, place.nbytes) == (t.dtype, t.shape, t.nbytes)
        assert array.tobytes() == (header + data)[place.offset : place.offset + place.nbytes]
        assert array.shape == t.shape and np.array_equal(array, expected[t.name])
        assert not array.flags.writeable


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(dtype="F64"),
        lambda entry: entry.update(shape=[3, 5]),
        lambda entry: entry.update(shape=[-3, -4]),
        lambda entry: entry.update(data_offsets=[4, 52]),
        lambda entry: entry.update(data_offsets=[-48, 0]),
        lambda entry: entry.pop("shape"),
        lambda entry: entry.update(shape="x"),
    ],
)
def test_damaged_headers(change, tmp_path):
    header, _ = lay_out([Stored("a", "F32", (3, 4))])
    entries = json.loads(header[8:])
    change(entries["a"])
    text = json.dumps(entries).encode()
    (tmp_path / "w").write_bytes(len(text).to_bytes(8, "little") + text + bytes(48))
    with pytest.raises(BadInputError, match="damaged header"):
        read_tensors(tmp_path / "w")


@pytest.mark.parametrize("size", [0, 7, 8, 40])
def test_files_shorter_than_their_header(size, tmp_path):
    header, _ = lay_out([Stored("a", "F32", (3, 4))])
    (tmp_path / "w").write_bytes(header[:size])
    with pytest.raises(BadInputError, match="too short"):
        read_tensors(tmp_path / "w")
