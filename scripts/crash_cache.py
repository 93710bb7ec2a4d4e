"""Kills writers of a cache folder at random moments, many times, and checks what they leave behind.

    python scripts/crash_cache.py --kills 300

Two processes store, load and evict in one folder; one of them is killed (SIGKILL) and started again. After every kill
the folder must hold nothing but entries that verify, and whatever its start removes, within its budget.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mimo_edge.kv import files
from mimo_edge.kv.keys import Tokens, as_tokens
from mimo_edge.kv.stored import Stored
from mimo_edge.kv.tiers import DiskTier

PAGE_SIZE, BUDGET, MODEL = 16, 3 << 20, "c" * 32


def open_tier(folder: Path) -> DiskTier:
    return DiskTier(folder, MODEL, BUDGET, daily=1 << 40)


def rows_of(tokens: Tokens, size: int) -> np.ndarray:
    """Bytes that follow from the tokens, so that a mix-up shows."""
    return np.resize(np.frombuffer(tokens.tobytes() + b"!", np.uint8), size)


def write_for_ever(folder: Path, seed: int) -> None:
    """Stores prefixes that share beginnings, as conversations do."""
    r, tier = random.Random(seed), open_tier(folder)
    tier.scan()
    prompts = [as_tokens([1])]
    while True:
        earlier = r.choice(prompts[-6:])
        tokens = as_tokens(
            [*earlier[: r.randint(0, len(earlier))], *(r.randint(0, 9) for _ in range(r.randint(1, 60)))]
        )
        prompts.append(tokens)
        stored = Stored.of(b"root", tokens, (0,), PAGE_SIZE)
        pages = [tokens[: (i + 1) * PAGE_SIZE] for i in range(len(stored.pages))]
        tier.store(
            stored, rows_of(tokens, 40_000), {n: rows_of(t, 20_000) for n, t in zip(stored.pages, pages, strict=True)}
        )
        if tier.snapshots:
            check(tier, r.choice(sorted(tier.snapshots)))


def check(tier: DiskTier, name: str) -> None:
    stored = tier.snapshots[name]
    loaded = tier.load(stored)
    if loaded is None:
        return
    own, pages = loaded
    assert np.array_equal(own, rows_of(stored.tokens, 40_000)), "another snapshot's rows"
    for i, rows in enumerate(pages):
        assert np.array_equal(rows, rows_of(stored.tokens[: (i + 1) * PAGE_SIZE], 20_000)), "another page's rows"


def verify(folder: Path) -> tuple[int, int]:
    """(entries, bytes) after a start; raises AssertionError if one is not whole or the folder is too large."""
    tier = open_tier(folder)
    tier.scan()
    assert tier.folder is not None
    for name in list(tier.snapshots):
        stored = tier.snapshots[name]
        assert tier.load(stored) is not None, f"{name} does not verify"
        check(tier, name)
    needed = {p for s in tier.snapshots.values() for p in s.pages} | set(tier.snapshots)
    present = {p.name for p in (folder / MODEL).iterdir()}
    assert present == needed, f"left behind: {sorted(present ^ needed)[:3]}"
    used = sum(files.on_disk(p.stat().st_size) for p in (folder / MODEL).iterdir())
    assert used == tier.folder.used <= BUDGET, f"{used} bytes, counted {tier.folder.used}, budget {BUDGET}"
    return len(tier.snapshots), used


def start(folder: Path, seed: int) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, __file__, "--write", str(folder), "--seed", str(seed)])


def crash(folder: Path, kills: int, seed: int) -> str:
    """Kills one of two writers so many times; says what was found."""
    r, unfinished = random.Random(seed), 0
    writers = [start(folder, seed * 1000 + i) for i in range(2)]
    try:
        for kill in range(kills):
            victim = r.randrange(2)
            time.sleep(0.25 + r.random() * 0.3)  # past the start of Python, somewhere in the loop
            assert writers[victim].poll() is None, "a writer failed by itself"
            writers[victim].kill()
            writers[victim].wait()
            unfinished += bool(list(folder.rglob("*" + files.TEMPORARY)))
            if kill % 10 == 9 or kill == kills - 1:  # both are dead: what is there must be whole
                writers[1 - victim].kill()
                writers[1 - victim].wait()
                verify(folder)
                writers[1 - victim] = start(folder, seed * 1000 + 500 + kill)
            writers[victim] = start(folder, seed * 1000 + 2 + kill)
    finally:
        for w in writers:
            w.kill()
            w.wait()
    entries, used = verify(folder)
    return (
        f"{kills} kills, {unfinished} left unfinished files; {entries} entries, all whole, {used:,} of {BUDGET:,} bytes"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_for_ever(options.write, options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        print(crash(Path(temporary) / "cache", options.kills, options.seed))
