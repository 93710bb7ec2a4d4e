"""`mimo-edge build`: the TensorRT form of a bundle becomes an engine of this machine."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mimo_edge.backends import tensorrt_engines as engines
from mimo_edge.backends.tensorrt_child import CHILD, Estimate, check_allocations, estimate, run_child
from mimo_edge.bundle import Bundle
from mimo_edge.errors import MimoEdgeError, UnsupportedError
from mimo_edge.kernels import index
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.trt_plugins import compat
from mimo_edge.trt_plugins.network import Request
from mimo_edge.trt_plugins.op import SHORT

WORKSPACE = 256 << 20  # bytes that a tactic may use; plugins need little
_RTX = (75, 80, 86, 89, 120, 121)  # what TensorRT-RTX builds engines for


def form_of(bundle: Bundle, target: str) -> index.TensorRtForm:
    engines.model_file(bundle, target)
    path = bundle.file(f"{index.folder(target)}/{index.TENSORRT_INFO}")
    return index.TensorRtForm.loads(path.read_bytes(), str(path))


def programs_of(bundle: Bundle, target: str) -> ProgramSet:
    path = bundle.file(f"{index.folder(target)}/{index.PROGRAMS}")
    return ProgramSet.loads(path.read_bytes(), str(path))


def request_of(form: index.TensorRtForm, programs: ProgramSet, sessions: int) -> Request:
    """Profiles for the programs' steps, and pools for so many sessions of the longest context."""
    rows = sorted(p.rows for name, p in programs.programs.items() if name.startswith("step.") and p.rows > SHORT)
    return Request(form.nodes, (rows[-1], rows[0]), sessions * programs.pages, sessions, WORKSPACE)


def build_engine(
    bundle: Bundle,
    trt: compat.TensorRt,
    target: str,
    *,
    sessions: int,
    limit: int | None = None,
    command: Sequence[str] = CHILD,
) -> tuple[Path, engines.EngineInfo, dict[str, Any]]:
    """Builds the engine of `target` and puts it where `engines.find` looks; returns its folder, what it says about
    itself, and the child's answer. Whatever fails, nothing is left behind and an older engine stays.

    Raises BadInputError, UnsupportedError and MimoEdgeError (memory, disk, a build that was killed).
    """
    if trt.rtx and int(target[3:]) not in _RTX:
        raise UnsupportedError(
            f"{trt.name} has no engines for {target}: build there, with JetPack's TensorRT; or use --check here"
        )
    model, final = engines.model_file(bundle, target), engines.folder(bundle, trt.name, target)
    programs, form = programs_of(bundle, target), form_of(bundle, target)
    request = request_of(form, programs, sessions)
    timings = engines.timing_cache(trt.name, target)
    with engines.workshop(final.name) as place:
        answer = _child(model, place, timings, request, programs, limit, command)
        if answer["version"] != trt.name:
            raise MimoEdgeError(f"the build ran with {answer['version']}, not {trt.name}: check PYTHONPATH")
        plan = place / engines.PLAN
        info = engines.EngineInfo(
            trt.name,
            target,
            bundle.fingerprint,
            engines.sha256(model),
            request.prefill,
            request.pages,
            request.sequences,
            answer["layers"],
            plan.stat().st_size,
            engines.sha256(plan),
        )
        try:
            engines.publish(place, final, info, timings)
        except OSError as e:
            raise _disk(e, place) from None
    return final, info, answer


def check_engine(
    model: Path,
    form: index.TensorRtForm,
    programs: ProgramSet,
    *,
    sessions: int,
    limit: int | None = None,
    command: Sequence[str] = CHILD,
) -> tuple[dict[str, Any], int]:
    """Builds and keeps nothing: the child's answer, and the bytes of the engine. Raises as build_engine does."""
    with engines.workshop("check") as place:
        request = request_of(form, programs, sessions)
        answer = _child(model, place, place / "none.timing", request, programs, limit, command)
        return answer, (place / engines.PLAN).stat().st_size


def needed(bundle: Bundle, target: str) -> Estimate:
    return estimate(programs_of(bundle, target))


def _child(
    model: Path,
    place: Path,
    timings: Path,
    request: Request,
    programs: ProgramSet,
    limit: int | None,
    command: Sequence[str],
) -> dict[str, Any]:
    check_allocations(programs)
    paths = {"model": str(model.resolve()), "out": str(place / engines.PLAN), "timing_cache": str(timings)}
    try:
        answer = run_child(paths | asdict(request), estimate(programs), limit, command)
    except OSError as e:
        raise _disk(e, place) from None
    plan = place / engines.PLAN
    if not plan.is_file() or not plan.stat().st_size:
        raise MimoEdgeError(f"the build answered {json.dumps(answer)} and wrote no engine: run it again")
    return answer


def _disk(e: OSError, place: Path) -> MimoEdgeError:
    if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return MimoEdgeError(
            f"disk full while the engine was written to {place.parent}: nothing was left behind; free some space, or "
            "set MIMO_EDGE_CACHE to another folder"
        )
    return MimoEdgeError(f"the engine could not be written to {place.parent}: {e.strerror}")
