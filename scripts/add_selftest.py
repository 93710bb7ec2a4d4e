"""Gives a bundle that was exported earlier its selftest.json, in place.

    python scripts/add_selftest.py BUNDLE

The bundle is copied beside itself, checked, and takes the old one's name. Weights, graphs and fingerprint stay as they
are; the manifest gets one more file.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from mimo_edge.bundle import Bundle
from mimo_edge.export.golden import add_golden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    path = parser.parse_args().bundle.absolute()
    new, old = (path.with_name(f"{path.name}.{suffix}") for suffix in ("new", "old"))
    add_golden(Bundle.open(path), new)
    path.rename(old)
    new.rename(path)
    Bundle.open(path)
    shutil.rmtree(old)


if __name__ == "__main__":
    main()
