"""Collects the general text named in sources.toml into two xz files (training and held-out), outside the repository.

    python -m scripts.reference_model.collect SCRATCH OUT

SCRATCH keeps downloads and unpacked packages; OUT receives general.txt.xz, heldout.txt.xz and a table of sizes.
Documents are separated by form feeds. The same packages give the same bytes.
"""

from __future__ import annotations

import hashlib
import lzma
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scripts.reference_model.extract import FORMATS
from scripts.reference_model.toml import read_toml

SEPARATOR = "\f"
HELD_OUT = 60  # one document in so many, chosen by its hash
SMALLEST = 400  # characters: shorter documents are navigation


def unpacked(package: str, scratch: Path) -> Path:
    """Folder of the unpacked Debian package; downloads it at most once."""
    target = scratch / "x" / package
    if not target.exists():
        debs = scratch / "debs"
        debs.mkdir(parents=True, exist_ok=True)
        if not list(debs.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", "-qq", package], cwd=debs, check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg", "-x", next(debs.glob(f"{package}_*.deb")), target], check=True)
    return target


def without_boilerplate(documents: Iterator[str]) -> Iterator[str]:
    """Drops lines of a package's pages once they were seen 8 times (menus), and short or repeated documents."""
    seen: Counter[str] = Counter()
    known: set[bytes] = set()
    for text in documents:
        lines = text.replace(SEPARATOR, "\n").splitlines()
        kept = [line for line in lines if len(line.strip()) < 4 or seen[line.strip()] < 8]
        seen.update({line.strip() for line in lines})
        body = "\n".join(kept).strip()
        digest = hashlib.blake2b(body.encode(), digest_size=8).digest()
        if len(body) >= SMALLEST and digest not in known:
            known.add(digest)
            yield body


def documents(source: dict, scratch: Path) -> list[str]:
    """At most `cap` megabytes of documents, spread evenly over the package (by hash) when it holds more."""
    root = unpacked(source["package"], scratch)
    for other in source.get("needs", []):
        unpacked(other, scratch)
    roots = [root / part for part in source.get("under", ["."])]
    found = [d for r in roots for d in without_boilerplate(FORMATS[source["format"]](r))]
    total, cap = sum(map(len, found)), source["cap"] * 1_000_000
    share = min(1.0, cap / max(total, 1))
    return [d for d in found if unit(d) < share]


def unit(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def main(scratch: Path, out: Path) -> None:
    sources = read_toml(Path(__file__).parent / "sources.toml")["source"]
    out.mkdir(parents=True, exist_ok=True)
    train: list[str] = []
    held: list[str] = []
    for source in sources:
        docs = documents(source, scratch)
        apart = [d for d in docs if int(unit(d) * 2**32) % HELD_OUT == 0]
        chosen = set(apart)
        train += [d for d in docs if d not in chosen]
        held += apart
        print(
            f"{source['package']:24} {len(docs):6} documents {sum(map(len, docs)) / 1e6:7.2f} MB  {source['licence']}"
        )
    for name, docs in (("general", train), ("heldout", held)):
        docs.sort(key=unit)
        data = SEPARATOR.join(docs).encode()
        dictionary = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 28}]
        (out / f"{name}.txt.xz").write_bytes(lzma.compress(data, format=lzma.FORMAT_XZ, filters=dictionary))
        print(f"{name}: {len(docs)} documents, {len(data) / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
