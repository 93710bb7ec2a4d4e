"""How much memory the prefix cache may take: at least one request's, at most the machine's."""

from __future__ import annotations

import os

from mimo_edge.device.system import System
from mimo_edge.errors import BadInputError

DEFAULT_BYTES = 256 << 20


def checked(wanted: int | None, reserve: int, need: int, context: int) -> int:
    """The budget in bytes: `wanted`, or by default DEFAULT_BYTES and no less than the `need` of one request of
    `context` tokens. `reserve` is the part to allocate at the start. Raises BadInputError."""
    budget = max(DEFAULT_BYTES, need) if wanted is None else wanted
    if budget < need:
        raise BadInputError(
            f"a cache of {budget:,} bytes cannot hold one request of {context} tokens, which takes {need:,}: raise "
            "--cache-bytes, or choose a smaller --context"
        )
    if budget > (machine := machine_memory()):
        raise BadInputError(
            f"a cache of {budget:,} bytes is more than this machine's memory of {machine:,}: choose a smaller "
            f"--cache-bytes (one request of {context} tokens takes {need:,})"
        )
    if not 0 <= reserve <= budget:
        raise BadInputError(f"reserve {reserve:,} is out of range (allowed: 0 to the cache's {budget:,} bytes)")
    return budget


def machine_memory() -> int:
    """Bytes of memory that this machine has, or that its container may take."""
    machine, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), System().cgroup_limit()
    return machine if limit is None else min(machine, limit.total)
