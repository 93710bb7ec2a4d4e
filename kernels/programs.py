"""All programs of a model for one target, and their JSON: what the exporter lowers a model to and a device runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mimo_edge.errors import BadInputError
from mimo_edge.kernels.launch import Buffer, Launch, Program, Variant

FORMAT = 1


@dataclass(frozen=True)
class ProgramSet:
    """`programs` maps names to the kinds of step; buffers of one name are one memory, as large as the largest asks.

    "step.T" evaluates T flat rows of one sequence and ends in logits when T <= 4, in `hidden` rows otherwise;
    "head.T" makes logits of T rows of `head_hidden`; pieces of drafting are named in export/programs/heads.py.
    `page_size` is the tokens of a page, `pages` the entries of a sequence's page table (the longest context), `rings`
    the slots of each window kind's ring and of what heads add (kv/layout.py).
    """

    page_size: int
    pages: int
    rings: dict[str, int]
    buffers: dict[str, Buffer]
    programs: dict[str, Program]

    def variants(self) -> dict[str, Variant]:
        """Every kernel that some program launches, by key."""
        return {v.key: v for p in self.programs.values() for v in (x.variant for x in (*p.launches, *p.commit))}

    @property
    def heads(self) -> int:
        """MTP heads that can draft."""
        return sum(name.startswith("draft.") for name in self.programs)

    def with_heads(self, count: int) -> ProgramSet:
        """Without pieces and pools of the heads from `count` on; with 0, steps leave no hidden states either."""
        gone = tuple(f"mtp.{m}.layer." for m in range(count, self.heads)) if count else ("mtp.",)
        buffers = {n: b for n, b in self.buffers.items() if b.role != "kv" or not n.startswith(gone)}
        programs = {n: p for n, p in self.programs.items() if _used(n, count)}
        if not count:
            for name, p in programs.items():
                launches, commit = (tuple(x for x in part if not _of_heads(x)) for part in (p.launches, p.commit))
                programs[name] = Program(p.rows, launches, commit)
        return replace(self, buffers=buffers, programs=programs)

    def dumps(self) -> str:
        data = {
            "format": FORMAT,
            "page_size": self.page_size,
            "pages": self.pages,
            "rings": self.rings,
            "buffers": {name: asdict(b) for name, b in self.buffers.items()},
            "variants": {key: asdict(v) for key, v in self.variants().items()},
            "programs": {
                name: {"rows": p.rows, "launches": _dump(p.launches), "commit": _dump(p.commit)}
                for name, p in self.programs.items()
            },
        }
        return json.dumps(data, separators=(",", ":")) + "\n"

    @staticmethod
    def loads(text: str | bytes, where: str) -> ProgramSet:
        """Raises BadInputError naming `where` when the text is not what `dumps` wrote."""
        try:
            data = json.loads(text)
            if data.get("format") != FORMAT:
                raise BadInputError(
                    f"{where}: format {data.get('format')!r}, this version reads {FORMAT}: export again"
                )
            variants = {key: Variant(**v) for key, v in data["variants"].items()}
            return ProgramSet(
                page_size=data["page_size"],
                pages=data["pages"],
                rings=data["rings"],
                buffers={n: Buffer(**{**b, "shape": tuple(b["shape"])}) for n, b in data["buffers"].items()},
                programs={
                    n: Program(p["rows"], _load(p["launches"], variants), _load(p["commit"], variants))
                    for n, p in data["programs"].items()
                },
            )
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise BadInputError(f"{where} is damaged ({type(e).__name__}: {e}): export the model again") from None


def _used(name: str, heads: int) -> bool:
    """Whether a program is of use with so many heads."""
    kind, *rest = name.split(".")
    if kind in ("draft", "best", "sample", "catchup"):
        return int(rest[-1]) < heads
    return heads > 0 or kind in ("step", "head")


def _of_heads(launch: Launch) -> bool:
    return launch.variant.kernel.startswith("mtp.")


def _dump(launches: tuple[Launch, ...]) -> list[list[Any]]:
    return [[x.variant.key, list(x.grid), x.args] for x in launches]


def _load(launches: list[list[Any]], variants: Mapping[str, Variant]) -> tuple[Launch, ...]:
    return tuple(Launch(variants[key], (grid[0], grid[1], grid[2]), args) for key, grid, args in launches)
