"""Builds a TensorRT engine in a process of its own, within a limit of memory that is checked first and then kept."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimo_edge.errors import BadInputError, MimoEdgeError, UnsupportedError
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.trt_plugins import compat

CHILD = (sys.executable, "-m", "mimo_edge.trt_plugins.child")
# TensorRT's libraries, builder and tactics, beside what the network needs. An assumption for Orin, on the safe side:
# TensorRT-RTX takes 0.25 GB for the reference model on x86 (docs/tensorrt.md).
LIBRARY_BYTES = 1 << 30
RESERVE_BYTES = 512 << 20  # what is left for the rest of the machine
ONE_ALLOCATION = 1 << 30  # Orin refuses larger ones (L4T 36.4.7)
_POLL_S = 0.2
_ERRORS: dict[int, type[MimoEdgeError]] = {1: MimoEdgeError, 2: BadInputError, 3: UnsupportedError}


@dataclass(frozen=True)
class Estimate:
    """Bytes that a build takes at its peak."""

    libraries: int
    network: int

    @property
    def total(self) -> int:
        return self.libraries + self.network

    def __str__(self) -> str:
        return f"{self.total / 1e6:,.0f} MB (TensorRT {self.libraries / 1e6:,.0f}, network {self.network / 1e6:,.0f})"


def estimate(programs: ProgramSet) -> Estimate:
    """No weights: activations of the longest step twice, as the builder's and as a tactic's that it tries."""
    scratch = sum(b.nbytes for b in programs.buffers.values() if b.role in ("scratch", "output", "input"))
    return Estimate(LIBRARY_BYTES, 2 * scratch)


def check_allocations(programs: ProgramSet) -> None:
    """Raises UnsupportedError when a step needs a single piece of scratch that Orin refuses.

    Language-model heads, which need one in other builders and are split there, are plugins here: a few rows of scratch.
    """
    name, size = max(
        ((n, b.nbytes) for n, b in programs.buffers.items() if b.role in ("scratch", "output")), key=lambda x: x[1]
    )
    if size > ONE_ALLOCATION:
        gib = size / 2**30
        raise UnsupportedError(f"{name} takes {gib:.2f} GiB in one piece (allowed: 1): export a shorter context")


def run_child(
    request: Mapping[str, Any],
    needed: Estimate,
    limit: int | None = None,
    command: Sequence[str] = CHILD,
    available: Callable[[], int] | None = None,
) -> dict[str, Any]:
    """What the child answers. `limit` is the most memory it may take, bytes; without one it is what is free, less a
    reserve, and that must be enough for the estimate.

    Raises what the child raised; MimoEdgeError when memory is short, the disk full, or the child was ended.
    """
    free = available or available_memory
    budget = free() - RESERVE_BYTES if limit is None else limit
    if limit is None and needed.total > budget:
        raise MimoEdgeError(
            f"the build needs about {needed}, {budget / 1e6:,.0f} MB may be used (free memory less "
            f"{RESERVE_BYTES / 1e6:,.0f} MB): close other programs, or give --memory-limit to try all the same"
        )
    with compat.library_path() as folder:
        env = dict(os.environ)
        if folder:
            env["LD_LIBRARY_PATH"] = ":".join(filter(None, (folder, env.get("LD_LIBRARY_PATH"))))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        child = subprocess.Popen(list(command), env=env, text=True, **pipes)  # type: ignore[call-overload]
        try:
            _hand_over(child, request)
            why = _watch(child, budget, free)
        finally:
            if child.poll() is None:
                child.kill()
            out, err = child.communicate()
    if why:
        raise MimoEdgeError(f"the build was ended: {why}: close other programs, or raise --memory-limit")
    return _answer(child.returncode, out, err, needed)


def _hand_over(child: subprocess.Popen, request: Mapping[str, Any]) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        pass  # it ended already; its exit status says why


def _watch(child: subprocess.Popen, budget: int, free: Callable[[], int]) -> str | None:
    """Waits for the child. Why it was ended, where it was; on a Jetson the GPU's memory shows only in what is free."""
    while True:
        try:
            child.wait(_POLL_S)
            return None
        except subprocess.TimeoutExpired:
            pass
        if (used := _resident(child.pid)) > budget:
            child.kill()
            return f"it took {used / 1e6:,.0f} MB, {budget / 1e6:,.0f} were allowed"
        if (left := free()) < RESERVE_BYTES // 2:
            child.kill()
            return f"only {left / 1e6:,.0f} MB of memory were left"


def _answer(status: int, out: str, err: str, needed: Estimate) -> dict[str, Any]:
    try:
        answer = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        how = f"killed ({signal.Signals(-status).name})" if status < 0 else f"ended with status {status}"
        last = f": {' '.join(err.split())[-200:]}" if err.strip() else ""
        memory = f"; it needs about {needed}" if status == -signal.SIGKILL else ""
        raise MimoEdgeError(f"the build was {how}{last}{memory}: nothing was left behind, run it again") from None
    if answer.get("errno") in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(answer["errno"], answer["error"])
    if "error" in answer:
        raise _ERRORS.get(answer["code"], MimoEdgeError)(answer["error"])
    return answer


def available_memory() -> int:
    """MemAvailable, bytes: on a Jetson the GPU's memory is the same."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise MimoEdgeError("/proc/meminfo has no MemAvailable: give --memory-limit")


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0  # it ended
    return pages * os.sysconf("SC_PAGE_SIZE")
