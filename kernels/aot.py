"""Compiles kernel variants for a named compute capability on a machine without a GPU; the device needs no compiler.

    entries = compile_variants(variants, 87, Path("bundle/kernels/sm_87"))

Every variant becomes KEY.cubin and KEY.ptx and an entry of the index. Results are kept in the user's cache folder
(MIMO_EDGE_CACHE, else ~/.cache/mimo-edge) under a hash of the variant, its sources and the compilers' versions.

Orin with JetPack 6.2 has a CUDA 12.6 driver: TRITON_PTXAS_PATH names the ptxas to use (of nvidia-cuda-nvcc-cu12
12.6.85 from PyPI, say). A cubin assembled by any CUDA 12 ptxas has ELF ABI 7, which that driver loads; one by CUDA 13
has ABI 8, which it does not.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.kernels.index import MAX_SHARED, KernelEntry, KernelIndex
from mimo_edge.kernels.launch import Variant

Progress = Callable[[int, int, str], None]  # done, total, what

_KERNELS = Path(__file__).parent
_PTX_TYPES = {"i32": ("u32", "s32", "b32"), "fp32": ("f32",), "i64": ("u64", "s64", "b64")}
_CUDA_12_ABI = 7


def compile_variants(
    variants: Iterable[Variant],
    capability: int,
    out: Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> KernelIndex:
    """Compiles for `capability` (87: sm_87) into the folder `out`, which exists, in parallel processes.

    `progress` is called with (variants done, of how many, what). Raises MimoEdgeError naming the variant when one does
    not compile, needs more than 163 KiB of shared memory, or comes out for another GPU than asked.
    """
    wanted = {v.key: v for v in variants}
    report = progress or (lambda done, total, what: None)
    what = f"compiling kernels for sm_{capability}"
    tools = toolchain()
    cached = {key: cache_folder() / _digest(v, capability, tools) for key, v in wanted.items()}
    missing = [key for key, path in cached.items() if not (path / "entry.json").is_file()]
    done = len(wanted) - len(missing)
    report(done, len(wanted), what)
    for _ in _compile_all([(wanted[k], capability, cached[k]) for k in missing], workers):
        done += 1
        report(done, len(wanted), what)
    entries = {}
    for key, path in sorted(cached.items()):
        entries[key] = KernelEntry(**json.loads((path / "entry.json").read_text()))
        for suffix in ("cubin", "ptx"):
            shutil.copyfile(path / f"kernel.{suffix}", out / f"{key}.{suffix}")
    some = out / f"{next(iter(entries))}.cubin" if entries else None
    return KernelIndex(
        target=f"sm_{capability}",
        triton=tools["triton"],
        ptxas=tools["ptxas"],
        ptx_isa=ptx_isa(some.with_suffix(".ptx").read_text()) if some else "",
        elf_abi=elf_abi(some.read_bytes()) if some else _CUDA_12_ABI,
        kernels=entries,
    )


def cache_folder() -> Path:
    """Where compiled kernels are kept between exports."""
    root = os.environ.get("MIMO_EDGE_CACHE")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mimo-edge"
    return base / "kernels"


@functools.lru_cache
def toolchain() -> dict[str, str]:
    """Versions of Triton and of the ptxas that it will run. Raises BadInputError when that ptxas cannot be run."""
    import triton

    path, asked = triton.knobs.nvidia.ptxas.path, os.environ.get("TRITON_PTXAS_PATH")
    if asked and Path(asked) != Path(path):  # Triton takes its own instead, without a word
        raise BadInputError(f"TRITON_PTXAS_PATH {asked} is no ptxas that runs: correct it, or unset it")
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        release = re.search(r"release ([\d.]+), V([\d.]+)", text)
        return {"triton": triton.__version__, "ptxas": release[1], "ptxas_build": release[2]}  # type: ignore[index]
    except (OSError, subprocess.SubprocessError, TypeError) as e:
        raise BadInputError(f"cannot run {path} --version ({e}): set TRITON_PTXAS_PATH to a ptxas that runs") from None


def source_hash(op: str) -> str:
    """SHA-256 of kernels/<op>/triton.py and of every module under kernels/ that it imports."""
    pending, seen = [f"{op}.triton"], set()
    digest = hashlib.sha256()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        path = _KERNELS.joinpath(*name.split(".")).with_suffix(".py")
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        digest.update(f"{name}\n{text}\n".encode())
        pending += sorted(re.findall(r"^(?:from|import) mimo_edge\.kernels\.([\w.]+)", text, re.MULTILINE))
    return digest.hexdigest()


def _digest(variant: Variant, capability: int, tools: dict[str, str]) -> str:
    parts = [variant.key, source_hash(variant.kernel.split(".")[0]), str(capability), json.dumps(tools, sort_keys=True)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _compile_all(jobs: list[tuple[Variant, int, Path]], workers: int | None) -> Iterable[None]:
    """Yields as jobs are done. Worker processes start fresh: Triton must not see TRITON_INTERPRET."""
    if not jobs:
        return
    count = min(len(jobs), workers or os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="mimo-edge-triton-") as scratch:
        pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start_worker, (scratch,))
        try:
            with _hidden_main():
                submitted = [pool.submit(_compile, *job) for job in jobs]
            for job in as_completed(submitted):
                job.result()
                yield
        except BaseException:  # Ctrl-C and termination: nobody waits for kernels under way
            for process in list(pool._processes.values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Fresh processes import the program's main file again, which would run a script without a guard once more each."""
    main = sys.modules["__main__"]
    held = {name: main.__dict__.get(name) for name in ("__file__", "__spec__")}
    main.__dict__.update(__file__=None, __spec__=None)
    try:
        yield
    finally:
        main.__dict__.update(held)


def _start_worker(scratch: str) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = scratch


def _compile(variant: Variant, capability: int, out: Path) -> None:
    """Writes kernel.cubin, kernel.ptx and entry.json into the new folder `out`, all or nothing."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    op, function = variant.kernel.split(".")
    fn = getattr(importlib.import_module(f"mimo_edge.kernels.{op}.triton"), function)
    signature = _signature(variant, fn.arg_names)
    pointers = [i for i, name in enumerate(fn.arg_names) if variant.types.get(name, "").startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(fn, signature=signature, constexprs=dict(variant.constants), attrs=aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as e:  # Triton's errors have no common base
        raise MimoEdgeError(f"kernel {_name(variant)} does not compile for sm_{capability}: {_line(e)}") from e
    entry = _entry(variant, capability, compiled)
    out.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(dir=out.parent, prefix=".partial-"))
    (temp / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    (temp / "kernel.ptx").write_text(compiled.asm["ptx"])
    (temp / "entry.json").write_text(json.dumps(asdict(entry)))
    try:
        os.rename(temp, out)
    except OSError:  # another process was quicker
        shutil.rmtree(temp, ignore_errors=True)


def _signature(variant: Variant, names: list[str]) -> dict[str, str]:
    """Triton's signature of the variant. Raises MimoEdgeError unless it names exactly the function's arguments."""
    runtime = [n for n in names if n not in variant.constants]
    if runtime != list(variant.types) or not set(variant.constants) <= set(names):
        raise MimoEdgeError(
            f"kernel {variant.kernel} takes {', '.join(names)}; the variant gives {', '.join(variant.types)} "
            f"and the constants {', '.join(variant.constants)}"
        )
    return {n: variant.types.get(n, "constexpr") for n in names}


def _entry(variant: Variant, capability: int, compiled: Any) -> KernelEntry:
    cubin, ptx, name = compiled.asm["cubin"], compiled.asm["ptx"], _name(variant)
    meta = compiled.metadata
    scratch = trailing_pointers(ptx, list(variant.types.values()), name)
    for size in ("global_scratch_size", "profile_scratch_size"):
        if getattr(meta, size, 0):
            raise MimoEdgeError(f"kernel {name} wants {getattr(meta, size)} bytes of {size[:-5]}: it must need none")
    if meta.shared > MAX_SHARED:
        raise MimoEdgeError(f"kernel {name} uses {meta.shared} bytes of shared memory (allowed: {MAX_SHARED})")
    if (got := cubin_capability(cubin)) != capability:
        raise MimoEdgeError(f"kernel {name} came out for sm_{got} instead of sm_{capability}: check TRITON_PTXAS_PATH")
    registers, spills = resources(cubin)
    return KernelEntry(
        kernel=variant.kernel,
        entry=compiled.metadata.name,
        types=dict(variant.types),
        scratch=scratch,
        num_warps=meta.num_warps,
        shared=meta.shared,
        registers=registers,
        spills=spills,
        source=source_hash(variant.kernel.split(".")[0]),
        cubin=hashlib.sha256(cubin).hexdigest(),
        ptx=hashlib.sha256(ptx.encode()).hexdigest(),
        overlap=bool(variant.constants.get("PDL", False)),
    )


def trailing_pointers(ptx: str, types: list[str], name: str) -> int:
    """How many pointers the PTX entry takes behind the arguments `types`. Raises MimoEdgeError if those differ."""
    entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", ptx)
    params = re.findall(r"\.param\s+\.(\w+)", entry[1]) if entry else []
    expected = [("u64", "b64") if t.startswith("*") else _PTX_TYPES[t] for t in types]
    head, tail = params[: len(types)], params[len(types) :]
    if len(head) < len(types) or any(p not in e for p, e in zip(head, expected, strict=True)) or set(tail) - {"u64"}:
        raise MimoEdgeError(f"kernel {name}: its PTX takes ({', '.join(params)}), expected ({', '.join(types)})")
    return len(tail)


def ptx_isa(ptx: str) -> str:
    """The version that the PTX text declares, "8.7"."""
    found = re.search(r"^\.version\s+([\d.]+)", ptx, re.MULTILINE)
    return found[1] if found else ""


def elf_abi(cubin: bytes) -> int:
    """The cubin's ELF ABI version (byte 8 of the header)."""
    return cubin[8]


def cubin_capability(cubin: bytes) -> int:
    """The compute capability that a cubin is for: e_flags, low byte in ABI 7, second byte in ABI 8."""
    flags = int.from_bytes(cubin[48:52], "little")
    return flags & 0xFF if elf_abi(cubin) <= _CUDA_12_ABI else flags >> 8 & 0xFF


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of its local memory (spills), as cuobjdump reports them."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    values = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text.stdout)}
    return values["REG"], values["STACK"] + values["LOCAL"]


def _name(variant: Variant) -> str:
    constants = ", ".join(f"{k}={v}" for k, v in variant.constants.items())
    return f"{variant.kernel}({constants})"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
