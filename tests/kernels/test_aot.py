"""Compiling without a GPU: the cache, the index, what is checked, and a reduced set of a model's kernels."""

import hashlib
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from specs import mimo_spec

from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.export.programs import lower
from mimo_edge.export.programs.tuning import tuning
from mimo_edge.kernels import aot
from mimo_edge.kernels.index import MAX_SHARED
from mimo_edge.kernels.launch import Variant

SCRIPTS = Path(__file__).parents[2] / "scripts"
ROTATION = Variant(
    "windowed_attention.rotation",
    {"positions": "*i32", "frequencies": "*fp32", "out": "*fp32"},
    {"HALF": 6, "PADDED": 8},
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIMO_EDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("capability", [87, 90])
def test_a_kernel_compiles_for_a_gpu_that_is_not_here(capability, cache, out):
    calls = []
    index = aot.compile_variants([ROTATION, ROTATION], capability, out, progress=lambda *a: calls.append(a))
    entry = index.kernels[ROTATION.key]
    cubin, ptx = (out / f"{ROTATION.key}.cubin").read_bytes(), (out / f"{ROTATION.key}.ptx").read_bytes()
    assert aot.cubin_capability(cubin) == capability and f".target sm_{capability}".encode() in ptx
    assert (entry.cubin, entry.ptx) == tuple(hashlib.sha256(x).hexdigest() for x in (cubin, ptx))
    assert list(entry.types) == ["positions", "frequencies", "out"], "in the order of the arguments"
    assert entry.entry == "rotation" and entry.scratch == 2 and entry.spills == 0 and 8 <= entry.registers < 64
    assert index.elf_abi == 7, "drivers of CUDA 12 (JetPack 6.2) load ABI 7 only: point TRITON_PTXAS_PATH at CUDA 12"
    assert calls == [(0, 1, f"compiling kernels for sm_{capability}"), (1, 1, f"compiling kernels for sm_{capability}")]


def test_the_second_time_comes_from_the_cache(cache, out, monkeypatch):
    first = aot.compile_variants([ROTATION], 87, out)
    monkeypatch.setattr(aot, "_compile_all", lambda jobs, workers: pytest.fail("compiled") if jobs else [])
    assert aot.compile_variants([ROTATION], 87, out) == first
    with pytest.raises(pytest.fail.Exception):
        aot.compile_variants([replace(ROTATION, num_warps=2)], 87, out)
    monkeypatch.setattr(aot, "source_hash", lambda op: "another")
    with pytest.raises(pytest.fail.Exception):
        aot.compile_variants([ROTATION], 87, out)


def test_a_script_without_a_guard_compiles_too(cache, out, tmp_path):
    """Worker processes must not run the caller's script again."""
    script = tmp_path / "export_me.py"
    script.write_text(
        "from pathlib import Path\n"
        "from mimo_edge.kernels.aot import compile_variants\n"
        "from mimo_edge.kernels.launch import Variant\n"
        f"index = compile_variants([{ROTATION!r}], 87, Path({str(out)!r}))\n"
        "print(len(index.kernels), __file__)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.stdout.split() == ["1", str(script)], done.stderr


def test_sources_that_a_kernel_imports_are_part_of_its_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "_KERNELS", tmp_path)
    for op, text in {"a": "from mimo_edge.kernels.b.triton import f\n", "b": "x = 1\n", "c": "y = 1\n"}.items():
        (tmp_path / op).mkdir()
        (tmp_path / op / "triton.py").write_text(text)
    before = {op: aot.source_hash(op) for op in "abc"}
    (tmp_path / "b" / "triton.py").write_text("x = 2\n")
    assert [op for op in "abc" if aot.source_hash(op) != before[op]] == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"types": {"positions": "*i32", "out": "*fp32"}}, "takes positions, frequencies, out, HALF, PADDED; the var"),
        ({"constants": {"HALF": 6, "PADDED": 7}}, r"rotation\(HALF=6, PADDED=7\) does not compile for sm_87"),
    ],
)
def test_a_variant_that_does_not_compile_is_named(change, message, cache, out):
    with pytest.raises(MimoEdgeError, match=message):
        aot.compile_variants([replace(ROTATION, **change)], 87, out)
    assert not list(cache.rglob("entry.json"))


def test_the_ptx_s_parameters_must_be_the_launcher_s():
    ptx = ".visible .entry f(\n.param .u64 .ptr .global .align 16 f_0,\n.param .u32 f_1,\n.param .u64 f_2\n)\n{"
    assert aot.trailing_pointers(ptx, ["*fp16", "i32"], "f") == 1
    with pytest.raises(MimoEdgeError, match=r"its PTX takes \(u64, u32, u64\), expected \(\*fp16, fp32\)"):
        aot.trailing_pointers(ptx, ["*fp16", "fp32"], "f")
    with pytest.raises(MimoEdgeError, match="expected"):
        aot.trailing_pointers(ptx, ["*fp16", "i32", "*i32", "*i32"], "f")


def test_a_ptxas_that_does_not_run(monkeypatch, tmp_path):
    aot.toolchain.cache_clear()
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "none"))
    try:
        with pytest.raises(BadInputError, match="TRITON_PTXAS_PATH"):
            aot.toolchain()
    finally:
        aot.toolchain.cache_clear()


@pytest.mark.parametrize("target", ["sm_87", "sm_90"])
def test_a_decode_step_compiles_without_spills(target, out):
    """MiMo-V2's shape with gates and a head's own kernels, tiny; docs/kernels_table.md has real sizes. The user's cache
    is used."""
    programs = lower(script_quant(mimo_spec(gate=True, mtp=1)), tuning(target), prefill_rows=(16,)).programs
    head = [x for x in programs["draft.0"].launches if x.variant.kernel in ("mtp.pair", "windowed_attention.decode")]
    decode = {x.variant.key: x.variant for x in (*programs["step.4"].launches, *head)}
    assert {"mtp.pair", "mtp.keep"} < {v.kernel for v in decode.values()}
    index = aot.compile_variants(decode.values(), int(target[3:]), out)
    assert len(index.kernels) > 8
    assert {k: e.spills for k, e in index.kernels.items() if e.spills} == {}
    assert max(e.shared for e in index.kernels.values()) <= MAX_SHARED


def script_quant(spec):
    from tiny_weights import quantised

    return quantised(spec)


@pytest.mark.parametrize("target", ["sm_87", "sm_90"])
def test_the_table_of_kernels_is_complete_and_no_decode_kernel_spills(target):
    table = script("kernel_table")
    text = table.PAGE.read_text().split(f"## {target} ")[1].split("## ")[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    shown = {row[0].strip("| `"): row for row in rows}
    assert shown.keys() == table.variants(target).keys(), "run python scripts/kernel_table.py"
    for key, (_, uses) in table.variants(target).items():
        spills, shared = int(shown[key][5].strip(" |")), int(shown[key][4])
        assert shared <= MAX_SHARED and not (spills and table.is_decode(uses)), key
