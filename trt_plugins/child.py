"""The process that builds an engine, so that whatever happens to it happens to nothing else.

It reads one JSON object from stdin, {"model", "out", "timing_cache": paths, and the fields of network.Request}, writes
`out`, and answers with one JSON line: {"layers", "version", "seconds", "peak" bytes}, or {"error", "code"} as errors.py
has them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from mimo_edge.errors import MimoEdgeError

_PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would take the result
    volunteer()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    request = json.loads(sys.stdin.readline())
    try:
        result = run(request)
    except MimoEdgeError as e:
        result = {"error": str(e), "code": e.exit_code}
    except OSError as e:
        result = {"error": e.strerror, "code": 1, "errno": e.errno}
    print(json.dumps(result), file=answer, flush=True)


def volunteer() -> None:
    """When memory runs out, the kernel ends this process first."""
    with contextlib.suppress(OSError):  # not permitted in some containers; the parent watches as well
        Path("/proc/self/oom_score_adj").write_text("1000")


def run(request: dict[str, Any]) -> dict[str, Any]:
    from mimo_edge.trt_plugins import compat, network
    from mimo_edge.trt_plugins.plugin import Plugins

    model, out, cache = (Path(request.pop(name)) for name in ("model", "out", "timing_cache"))
    trt = compat.load()
    asked = network.Request(**request)
    timings = cache.read_bytes() if cache.is_file() else b""
    built = network.build(trt, Plugins(trt), model.read_bytes(), asked, timings)
    out.write_bytes(built.plan)
    out.with_suffix(".timing").write_bytes(built.timing_cache)
    return {"layers": dict(built.layers), "version": trt.name, "seconds": round(built.seconds, 2), "peak": peak()}


def peak() -> int:
    """The most memory that this process had at once, bytes. (getrusage counts what its parent had, too.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


if __name__ == "__main__":
    main()
