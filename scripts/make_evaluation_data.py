"""Makes the suites that `mimo-edge eval` ships: held-out commands, and held-out text in the public domain.

    python -m scripts.make_evaluation_data SCRATCH

SCRATCH is collect.py's folder of unpacked packages (made when it is not there). Texts are beginnings of documents that
training never saw, from the sources of sources.toml whose licence is "public domain".
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

from mimo_edge.evaluation.suites import SUITES
from scripts.reference_model.collect import HELD_OUT, documents, unit
from scripts.reference_model.intents import frequencies
from scripts.reference_model.prepare import PER_INTENT, held_out, line
from scripts.reference_model.toml import read_toml

COMMANDS = 10  # of every intent
TEXTS, CHARACTERS = 40, 8_000  # documents, and the most of each


def commands() -> list[str]:
    """JSON lines, one of every intent after the other, so that any beginning of the file is spread over all intents."""
    samples = held_out()
    intents = len(frequencies()[0])
    return [line(samples[i * PER_INTENT + n]) for n in range(COMMANDS) for i in range(intents)]


def texts(scratch: Path) -> list[str]:
    """JSON lines."""
    sources = read_toml(Path(__file__).parent / "reference_model" / "sources.toml")["source"]
    found = [d for s in sources if s["licence"].startswith("public domain") for d in documents(s, scratch)]
    apart = sorted((d for d in found if int(unit(d) * 2**32) % HELD_OUT == 0), key=unit)
    return [json.dumps({"text": d[:CHARACTERS]}, ensure_ascii=False) for d in apart[:TEXTS]]


def main(scratch: Path) -> None:
    for name, lines in (("commands", commands()), ("perplexity", texts(scratch))):
        SUITES[name].parent.mkdir(exist_ok=True)
        SUITES[name].write_bytes(lzma.compress(("\n".join(lines) + "\n").encode(), preset=9 | lzma.PRESET_EXTREME))
        print(f"{SUITES[name]}: {len(lines)} lines, {SUITES[name].stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
