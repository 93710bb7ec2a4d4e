"""What this process does so that the machine stays usable: it gives memory back, and is the first to go."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

log = logging.getLogger("mimo_edge")
OOM_SCORE = 500  # of 1000, on top of the share of memory: killed before the robot's other processes of like size


def give_back() -> None:
    """Returns memory that was freed to the system; reading a large tokenizer leaves 200 MB of it behind.

    Does nothing where the C library has no malloc_trim (musl, macOS).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def volunteer(root: Path = Path("/")) -> bool:
    """Makes this process the one that the kernel kills first when memory runs out; whether that was possible.

    A score that is higher already stays (a service may have set it).
    """
    file = root / "proc/self/oom_score_adj"
    try:
        if int(file.read_text()) < OOM_SCORE:
            file.write_text(str(OOM_SCORE))
        return True
    except (OSError, ValueError) as e:
        log.debug("this process keeps its place when memory runs out (%s: %s)", file, e)
        return False
