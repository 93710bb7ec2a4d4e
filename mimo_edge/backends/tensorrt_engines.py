"""Where engines are kept, and which one may be used. One folder an engine, that appears whole or not at all:

    $MIMO_EDGE_CACHE (~/.cache/mimo-edge) /engines/
        tensorrt-10.16.2.10-sm_87-0123456789abcdef/   TensorRT's version, compute capability, bundle's fingerprint
            engine.plan  engine.json
        tensorrt-10.16.2.10-sm_87.timing              TensorRT's timing cache

The bundle itself may be read-only, and is the same on all machines; an engine is for one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from mimo_edge.bundle import Bundle
from mimo_edge.disk import sync
from mimo_edge.errors import BadInputError, MimoEdgeError, UnsupportedError
from mimo_edge.kernels import index
from mimo_edge.spec import from_json

FORMAT = 1
PLAN, INFO = "engine.plan", "engine.json"


@dataclass(frozen=True)
class EngineInfo:
    """`model` is the SHA-256 of the TensorRT form that was built; pools may have so many pages and sequences."""

    tensorrt: str
    target: str
    fingerprint: str
    model: str
    prefill: tuple[int, ...]
    pages: int
    sequences: int
    layers: dict[str, int]
    bytes: int
    sha256: str
    format: int = FORMAT


def root() -> Path:
    given = os.environ.get("MIMO_EDGE_CACHE")
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mimo-edge"
    return base / "engines"


def folder(bundle: Bundle, tensorrt: str, target: str) -> Path:
    return root() / f"{tensorrt}-{target}-{bundle.fingerprint[:16]}"


def timing_cache(tensorrt: str, target: str) -> Path:
    return root() / f"{tensorrt}-{target}.timing"


def model_file(bundle: Bundle, target: str) -> Path:
    """The TensorRT form of a bundle for a GPU. Raises UnsupportedError when it has none."""
    name = f"{index.folder(target)}/{index.TENSORRT}"
    if not bundle.has(name):
        raise UnsupportedError(
            f"{bundle.path} has no TensorRT form for {target}: run `mimo-edge export SRC --target {target} -o DIR`"
        )
    return bundle.file(name)


def found(bundle: Bundle) -> list[str]:
    """What the bundle has engines for, as "tensorrt-10.3.0-sm_87"; looks at names alone."""
    return sorted(p.name.rpartition("-")[0] for p in root().glob(f"tensorrt*-{bundle.fingerprint[:16]}"))


def check_any(bundle: Bundle) -> None:
    """Raises UnsupportedError when the bundle has no engine at all: then TensorRT need not be loaded to say so."""
    if not found(bundle):
        raise UnsupportedError(f"{bundle.path} has no engine: {_fix(bundle)}")


def _fix(bundle: Bundle) -> str:
    return f"run `mimo-edge build {bundle.path}`"


def find(bundle: Bundle, tensorrt: str, target: str) -> tuple[Path, EngineInfo]:
    """The plan to run with this TensorRT on this GPU.

    Raises UnsupportedError, with the command that makes one, when there is none, or only another's or a damaged one.
    """
    place, fix, others = folder(bundle, tensorrt, target), _fix(bundle), ", ".join(found(bundle))
    if not (place / INFO).is_file():
        raise UnsupportedError(
            f"the engines of {bundle.path} are for {others or 'no machine'}; this one has {tensorrt}, {target}: {fix}"
        )
    info = read_info(place / INFO)
    if (info.tensorrt, info.target, info.fingerprint) != (tensorrt, target, bundle.fingerprint):
        raise UnsupportedError(
            f"{place} holds an engine of {info.tensorrt}, {info.target}, bundle {info.fingerprint[:16]}; this is "
            f"{tensorrt}, {target}, bundle {bundle.fingerprint[:16]}: {fix}"
        )
    if info.model != sha256(model_file(bundle, target)):
        raise UnsupportedError(f"{place} was built from another export of {bundle.path}: {fix}")
    plan = place / PLAN
    if not plan.is_file() or plan.stat().st_size != info.bytes or sha256(plan) != info.sha256:
        raise UnsupportedError(f"{plan} is damaged: {fix}")
    return plan, info


def read_info(path: Path) -> EngineInfo:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise BadInputError(f"{path} is damaged ({e}): remove {path.parent} and build again") from None
    if isinstance(data, dict) and data.get("format") != FORMAT:
        raise BadInputError(f"{path}: format {data.get('format')!r}, this version reads {FORMAT}: build again")
    return from_json(EngineInfo, data, str(path))


@contextmanager
def workshop(name: str) -> Iterator[Path]:
    """A folder to build in, beside the engines, removed at the end; those of processes that were killed go first."""
    base = root()
    try:
        base.mkdir(parents=True, exist_ok=True)
        for left in base.glob(".*.partial"):
            pid = left.name.split(".")[-2]
            if not Path(f"/proc/{pid}").exists():
                shutil.rmtree(left, ignore_errors=True)
        place = base / f".{name}.{os.getpid()}.partial"
        place.mkdir()
    except OSError as e:
        raise MimoEdgeError(f"cannot write to {base}: {e.strerror}: set MIMO_EDGE_CACHE to another folder") from None
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def publish(place: Path, final: Path, info: EngineInfo, timings: Path) -> None:
    """Moves the engine in the workshop `place` to where `find` looks; one that was there is replaced."""
    new = place / "new"
    new.mkdir()
    (place / PLAN).rename(new / PLAN)
    (new / INFO).write_text(json.dumps(asdict(info), indent=1) + "\n", encoding="utf-8")
    for path in (new / PLAN, new / INFO, new):
        sync(path)
    if final.exists():
        final.rename(place / "old")
    new.rename(final)
    cache = place / Path(PLAN).with_suffix(".timing")
    if cache.is_file():
        cache.replace(timings)
    sync(final.parent)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(4 << 20):
            digest.update(block)
    return digest.hexdigest()
