"""What happens around a build: memory that is short, a child that dies, a full disk, an engine that is replaced."""

import json
import os
import sys
from dataclasses import replace

import pytest
from cuda_bundle import write_cuda_bundle
from specs import qwen_spec

from mimo_edge.backends import tensorrt_child, tensorrt_engines
from mimo_edge.backends.tensorrt_build import build_engine
from mimo_edge.backends.tensorrt_child import Estimate, available_memory, check_allocations, estimate, run_child
from mimo_edge.cli.main import main
from mimo_edge.errors import BadInputError, MimoEdgeError, UnsupportedError
from mimo_edge.kernels.launch import Buffer
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.trt_plugins import compat

SMALL = Estimate(1 << 20, 1 << 20)
TRT = compat.TensorRt(None, "10.3.0", rtx=False)
BUILDS = """
import json, sys
from pathlib import Path
request = json.loads(sys.stdin.readline())
out = Path(request["out"])
{body}
print(json.dumps({{"layers": {{"Int4Linear": 9}}, "version": "tensorrt-10.3.0", "seconds": 0.1, "peak": 1}}))
"""


def child(body="out.write_bytes(b'plan')"):
    return [sys.executable, "-c", BUILDS.format(body=body)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_cuda_bundle(tmp_path_factory.mktemp("b") / "qwen", qwen_spec(1))


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("MIMO_EDGE_CACHE", str(tmp_path))
    return tmp_path / "engines"


def build(bundle, body="out.write_bytes(b'plan')", **options):
    return build_engine(bundle, TRT, "sm_87", sessions=2, command=child(body), **options)


def test_an_engine_appears_whole_under_version_gpu_and_bundle_and_is_replaced(bundle, root):
    body = "out.write_bytes(b'plan'); out.with_suffix('.timing').write_bytes(b'times')"
    folder, info, _ = build(bundle, body)
    assert folder == root / f"tensorrt-10.3.0-sm_87-{bundle.fingerprint[:16]}"
    assert (folder / "engine.plan").read_bytes() == b"plan" and info.layers == {"Int4Linear": 9}
    assert tensorrt_engines.find(bundle, "tensorrt-10.3.0", "sm_87") == (folder / "engine.plan", info)
    assert (root / "tensorrt-10.3.0-sm_87.timing").read_bytes() == b"times"
    build(bundle, "out.write_bytes(b'plan two')")
    assert (folder / "engine.plan").read_bytes() == b"plan two"
    assert sorted(p.name for p in root.iterdir()) == [folder.name, "tensorrt-10.3.0-sm_87.timing"]


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", MimoEdgeError, r"was killed \(SIGKILL\).*nothing was left behind"),
        ("raise SystemExit('no GPU')", MimoEdgeError, "ended with status 1: no GPU"),
        (
            "print(json.dumps({'error': 'full', 'code': 1, 'errno': 28})); sys.exit()",
            MimoEdgeError,
            "disk full",
        ),
        ("print(json.dumps({'error': 'field bits 5', 'code': 2})); sys.exit()", BadInputError, "field bits 5"),
        ("", MimoEdgeError, "wrote no engine"),
    ],
    ids=["killed", "failed", "disk", "input", "nothing"],
)
def test_a_build_that_fails_leaves_the_older_engine_and_nothing_else(bundle, root, body, error, message):
    folder, _, _ = build(bundle)
    with pytest.raises(error, match=message):
        build(bundle, "out.write_bytes(b'half'); " + body if body else body)
    assert [p.name for p in root.iterdir()] == [folder.name]
    assert (folder / "engine.plan").read_bytes() == b"plan"


def test_a_full_disk_while_the_engine_is_put_in_place(bundle, root, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorrt_engines, "sync", full)
    with pytest.raises(MimoEdgeError, match=r"disk full while the engine was written to .*nothing was left behind"):
        build(bundle)
    assert not list(root.iterdir())


def test_what_a_killed_build_left_is_removed_by_the_next(bundle, root):
    root.mkdir(parents=True)
    dead = root / ".tensorrt-10.3.0-sm_87-x.4194305.partial"  # above the highest process number
    mine = root / f".other.{os.getpid()}.partial"
    for left in (dead, mine):
        left.mkdir()
    build(bundle)
    assert not dead.exists() and mine.exists()


def test_a_folder_that_cannot_be_written_is_named(bundle, root):
    root.write_text("a file")
    with pytest.raises(MimoEdgeError, match=r"cannot write to .*engines.*: set MIMO_EDGE_CACHE"):
        build(bundle)


def test_too_little_memory_is_refused_before_anything_starts(bundle, monkeypatch):
    monkeypatch.setattr(tensorrt_child, "available_memory", lambda: (1 << 30) + tensorrt_child.RESERVE_BYTES)
    wanted = r"needs about [\d,]+ MB \(TensorRT 1,074, network .* 1,074 MB may be used .*give --memory-limit"
    with pytest.raises(MimoEdgeError, match=wanted):
        build(bundle)
    build(bundle, limit=1 << 30)  # asked for


def test_the_limit_holds_while_the_build_runs():
    code = "x = bytearray(200 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nwhile True: pass"
    hungry = [sys.executable, "-c", code]
    with pytest.raises(MimoEdgeError, match=r"build was ended: it took [\d,]+ MB, 105 were allowed"):
        run_child({}, SMALL, limit=100 << 20, command=hungry)
    left = iter([8 << 30, 1 << 20])
    with pytest.raises(MimoEdgeError, match="only 1 MB of memory were left"):
        run_child({}, SMALL, command=[sys.executable, "-c", "while True: pass"], available=lambda: next(left))


def test_the_estimate_follows_the_longest_step(bundle):
    programs = ProgramSet.loads(bundle.file("kernels/sm_87/programs.json").read_bytes(), "")
    longer = replace(programs, buffers=programs.buffers | {"h": Buffer("fp16", (512, 100_000), "scratch")})
    assert estimate(longer).network - estimate(programs).network == 2 * (
        longer.buffers["h"].nbytes - programs.buffers["h"].nbytes
    )
    check_allocations(longer)
    huge = replace(programs, buffers={"h": Buffer("fp32", (512, 600_000), "scratch")})
    with pytest.raises(UnsupportedError, match=r"h takes 1.14 GiB in one piece \(allowed: 1\)"):
        check_allocations(huge)
    assert available_memory() > 0


def test_another_tensorrt_in_the_child_and_rtx_for_orin_are_refused(bundle, root):
    with pytest.raises(MimoEdgeError, match=r"the build ran with tensorrt-10.3.0, not tensorrt-10.16.2"):
        build_engine(bundle, replace(TRT, version="10.16.2"), "sm_87", sessions=1, command=child())
    with pytest.raises(UnsupportedError, match=r"tensorrt-rtx-1.7 has no engines for sm_87"):
        build_engine(bundle, compat.TensorRt(None, "1.7", rtx=True), "sm_87", sessions=1, command=child())
    assert not list(root.iterdir())


def run_cli(*args):
    with pytest.raises(SystemExit) as caught:
        main(["build", *args])
    return caught.value.code


def test_the_command_checks_a_bundle_without_a_gpu(bundle, root, capsys):
    pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX has wheels for Linux on x86-64 alone")
    assert not run_cli(str(bundle.path), "--check")
    out, err = capsys.readouterr()
    assert out == "1 Int4Embedding, 1 Int4GateUp, 1 Int4Head, 3 Int4Linear, 1 Rotation, 1 WindowedAttention, 1 GATHER\n"
    assert "tensorrt-rtx-" in err and "sm_87: needs about" in err and "nothing was kept" in err
    assert not list(root.iterdir())


def test_the_command_says_what_is_missing(bundle, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compat, "load", lambda: TRT)
    assert run_cli(str(bundle.path), "--target", "sm_87") == 2
    assert "--target goes with --check" in capsys.readouterr().err
    assert run_cli(str(bundle.path), "--check", "--target", "sm_90") == 3
    assert (
        "has kernels for sm_87, not sm_90: run `mimo-edge export SRC --target sm_90 -o DIR`" in capsys.readouterr().err
    )
    manifest = json.loads((bundle.path / "manifest.json").read_text())
    assert "kernels/sm_87/model.trt.onnx" in manifest["files"]
    monkeypatch.setattr(type(bundle), "has", lambda self, name: "model.trt" not in name)
    assert run_cli(str(bundle.path), "--check") == 3
    assert "has no TensorRT form for sm_87: run `mimo-edge export" in capsys.readouterr().err
