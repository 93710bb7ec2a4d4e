"""mimo-edge inspect: what a bundle or a checkpoint holds, and what it will need."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mimo_edge.cli.common import debug_option, progress
from mimo_edge.extras import needs_extra

if TYPE_CHECKING:
    from rich.table import Table

    from mimo_edge.spec import ModelSpec

EXAMPLES = """
\b
Examples:
  mimo-edge inspect gemma
  mimo-edge inspect gemma --context 4096 --json | jq .pools
  mimo-edge inspect gemma-3-270m.gguf
"""


@click.command(epilog=EXAMPLES)
@click.argument("path", metavar="[BUNDLE|SRC]", required=False, type=click.Path(path_type=Path))
@click.option("--context", type=int, help="Tokens to size the KV pools for  [default: the model's context]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@debug_option
def inspect(path: Path | None, context: int | None, as_json: bool) -> None:
    """Show layers, KV pools and bytes.

    Of the built-in model, when nothing is named. Of a bundle, every file is checked. Of a checkpoint, only headers are
    read, and it says what 4 bits would take.
    """
    with progress() as report:
        from mimo_edge.bundle import BUILT_IN

        report(None, None, f"reading {path or 'the built-in model'}")
        spec, about = _open(BUILT_IN if path is None else path)
    facts = about | describe(spec, context)
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
    else:
        _print(facts)


def _open(path: Path) -> tuple[ModelSpec, dict[str, Any]]:
    if (path / "manifest.json").is_file():
        from mimo_edge.bundle import Bundle, head_graphs

        bundle = Bundle.open(path)
        m, graphs = bundle.manifest, head_graphs("model.cpu.onnx", bundle.spec)
        about = {"kind": "bundle", "name": m.name, "target": m.target, "fingerprint": m.fingerprint}
        return bundle.spec, about | {"head_graphs": sum(bundle.has(name) for name in graphs)}
    with needs_extra("export", "inspecting a checkpoint"):
        from mimo_edge.export.families import open_checkpoint
    checkpoint = open_checkpoint(path)
    return checkpoint.spec, {
        "kind": "checkpoint",
        "name": checkpoint.name,
        "target": None,
        "fingerprint": None,
        "head_graphs": None,
    }


def describe(spec: ModelSpec, context: int | None) -> dict[str, Any]:
    """Everything about a model that follows from its spec, as JSON."""
    from mimo_edge.kv.layout import plan_layout, resolve_context
    from mimo_edge.params import count
    from mimo_edge.spec import QuantSpec, TensorQuant

    layout = plan_layout(spec, resolve_context(spec, context))
    q = TensorQuant(4, 32)
    bytes_by_kind = {"stored": _bytes(spec)}
    if spec.quant == QuantSpec():  # a checkpoint: what it would take
        bytes_by_kind = {"float32": _bytes(spec), "4 bit": _bytes(replace(spec, quant=QuantSpec(q, q, q, q)))}
    return {
        "family": spec.family,
        "weights": count(spec),
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "layers": _layers(spec),
        "mtp": asdict(spec.mtp) if spec.mtp else None,
        "quant": asdict(spec.quant),
        "bytes": bytes_by_kind,
        "pools": {
            "context": layout.context,
            "full": {"bytes_per_token": layout.full_token_bytes, "bytes": layout.full_bytes},
            "window": {"slots": layout.rings, "bytes": layout.window_bytes},
        },
    }


def _layers(spec: ModelSpec) -> list[dict[str, Any]]:
    """Layers that are alike, with their numbers."""
    groups = dict.fromkeys(spec.layers)
    return [
        {
            "layers": [i for i, layer in enumerate(spec.layers) if layer == group],
            "attention": {"kind": group.attention, **asdict(spec.attention[group.attention])},
            "ffn": {"kind": group.ffn, **asdict(spec.ffn[group.ffn])},
        }
        for group in groups
    ]


def _bytes(spec: ModelSpec) -> dict[str, int]:
    """Stored bytes of each kind of tensor; what a group does not divide stays in float."""
    from mimo_edge.params import parameters, stored

    sizes: Counter[str] = Counter()
    for p in parameters(spec):
        quant = spec.quant.of(p.kind)
        fits = quant is not None and p.shape[-1] % quant.group == 0
        sizes[p.kind] += sum(t.nbytes for t in stored(p, quant if fits else None))
    return {**sizes, "total": sum(sizes.values())}


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    what = f"{facts['family']} {facts['kind']}, {facts['weights'] / 1e6:,.0f}M weights"
    console.print(f"[bold]{facts['name']}[/] ({what})", highlight=False)
    for table in (_layer_table(facts["layers"]), _byte_table(facts), _pool_table(facts["pools"])):
        console.print(table)
    if facts["mtp"]:
        console.print(_heads(facts), highlight=False)


def _heads(facts: dict[str, Any]) -> str:
    mtp = facts["mtp"]
    text = f"{mtp['heads']} MTP heads, attention {mtp['attention']}, feed-forward {mtp['ffn']}"
    if facts["head_graphs"] in (None, mtp["heads"]):
        return text
    return f"{text}; the bundle has graphs of {facts['head_graphs']}: export it again to draft on a CPU"


def _layer_table(groups: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("layers", "window", "heads (kv)", "head size", "rope theta", "feed-forward")
    for g in groups:
        a, f = g["attention"], g["ffn"]
        size = str(a["head_dim"]) if a["head_dim"] == a["v_head_dim"] else f"{a['head_dim']}, v {a['v_head_dim']}"
        ffn = (
            f"{f['moe']['experts']} x {f['intermediate']}, best {f['moe']['top_k']}"
            if f["moe"]
            else str(f["intermediate"])
        )
        heads, theta = f"{a['heads']} ({a['kv_heads']})", f"{a['rope_theta']:,.0f}"
        table.add_row(ranges(g["layers"]), str(a["window"] or "full"), heads, size, theta, ffn)
    return table


def _byte_table(facts: dict[str, Any]) -> Table:
    from rich.table import Table

    columns = facts["bytes"]
    table = Table("tensors", *columns)
    for kind in next(iter(columns.values())):
        q = facts["quant"].get(kind)
        form = f" ({q['bits']} bit, groups of {q['group']})" if q else ""
        table.add_row(kind + form, *(megabytes(sizes.get(kind, 0)) for sizes in columns.values()))
    return table


def _pool_table(pools: dict[str, Any]) -> Table:
    from rich.table import Table

    full, window = pools["full"], pools["window"]
    table = Table("KV pool", "size", "bytes")
    per_token = f"{pools['context']:,} tokens of {full['bytes_per_token']:,} bytes"
    table.add_row("full layers", per_token, megabytes(full["bytes"]))
    slots = ", ".join(f"{n} slots ({kind})" for kind, n in window["slots"].items())
    table.add_row("window layers", slots or "none", megabytes(window["bytes"]))
    return table


def megabytes(n: int) -> str:
    return f"{n / 1e6:,.1f} MB" if n >= 100_000 else f"{n / 1e3:,.1f} kB"


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
