"""Documents out of unpacked packages: one function a format, each a generator of plain texts."""

from __future__ import annotations

import gzip
import html
import re
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

BLOCK = re.compile(r"</?(?:p|div|li|ul|ol|dl|dt|dd|tr|table|h[1-6]|pre|br|hr|section|blockquote)\b[^>]*>", re.I)
DROP = re.compile(r"<(script|style|head|nav|footer|svg|noscript)\b.*?</\1\s*>", re.I | re.S)
TAG = re.compile(r"<[^>]*>")
STRING = re.compile(rb"\x00[\x04\x08\x00]\x00\x09")  # header of an R string (CHARSXP) in XDR serialisation


def html_text(page: str) -> str:
    """Visible text of an HTML page, tags dropped; lines follow the page's block elements."""
    page = BLOCK.sub("\n", DROP.sub(" ", page))
    text = html.unescape(TAG.sub("", page)).replace("\u00b6", "").replace("\xa0", " ")
    lines = (re.sub(r"[ \t]+$", "", line) for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def from_html(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.html")):
        # translations (index.html.de) have other suffixes; pages above 3 MB are generated indices
        if (
            path.is_file()
            and path.stat().st_size < 3_000_000
            and not re.search(r"genindex|search|py-modindex", path.name)
        ):
            yield html_text(path.read_text("utf-8", errors="ignore"))


def from_bible(root: Path) -> Iterator[str]:
    """`root` holds the data file and, beside it, the unpacked reader; one document a run of 200 verses."""
    reader = root.parent / "bible-kjv" / "usr/bin/bible"
    out = subprocess.run(
        [reader, "-f", "-p", root / "usr/lib", "gen1:1-rev22:21"], capture_output=True, text=True, check=True
    )
    verses = [line for line in out.stdout.splitlines() if line.strip()]
    for start in range(0, len(verses), 200):
        yield "\n".join(verses[start : start + 200])


def from_wordnet(root: Path) -> Iterator[str]:
    """`words: gloss` lines of the four data files, 200 to a document."""
    lines = []
    for part in ("noun", "verb", "adj", "adv"):
        for line in (root / "usr/share/wordnet" / f"data.{part}").read_text("latin-1").splitlines():
            if line.startswith("  ") or " | " not in line:
                continue
            fields, gloss = line.split(" | ", 1)
            cols = fields.split()
            words = cols[4 : 4 + 2 * int(cols[3], 16) : 2]
            lines.append(f"{', '.join(words).replace('_', ' ')} ({part}): {gloss.strip()}")
    for start in range(0, len(lines), 200):
        yield "\n".join(lines[start : start + 200])


def from_dictzip(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.dict.dz")):
        text = gzip.decompress(path.read_bytes()).decode("utf-8", errors="ignore")
        for start in range(0, len(text), 12_000):
            yield text[start : start + 12_000].strip()


def from_rdb(root: Path) -> Iterator[str]:
    """Strings of a zlib-compressed R lazy-load data base: 4 bytes of length, then one zlib stream, again and again."""
    for path in sorted(root.rglob("data/*.rdb")):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            stream = zlib.decompressobj()
            plain = stream.decompress(data[at + 4 :])
            at = len(data) - len(stream.unused_data)
            lines = list(_r_strings(plain))
            for start in range(0, len(lines), 400):
                yield "\n".join(lines[start : start + 400])


def _r_strings(plain: bytes) -> Iterator[str]:
    at = 0
    while (hit := STRING.search(plain, at)) is not None:
        size = int.from_bytes(plain[hit.end() : hit.end() + 4], "big")
        at = hit.end() + 4
        if 0 <= size < 4096:
            yield plain[at : at + size].decode("utf-8", errors="ignore")
            at += size


FORMATS = {
    "html": from_html,
    "bible": from_bible,
    "wordnet": from_wordnet,
    "dictzip": from_dictzip,
    "rdb": from_rdb,
}
