"""An evaluation as a picture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mimo_edge.errors import BadInputError
from mimo_edge.evaluation.results import Drafts, Results
from mimo_edge.extras import needs_extra

WEAKEST = 20  # intents shown


def check_plot(path: Path) -> None:
    """Raises BadInputError when the ending names no image format or the folder is not there, UnsupportedError without
    matplotlib."""
    with needs_extra("eval", "--plot"):
        from matplotlib.backend_bases import FigureCanvasBase
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise BadInputError(f"--plot {path}: not an image format (allowed: {', '.join(sorted(known))})")
    if not path.parent.is_dir():
        raise BadInputError(f"--plot {path}: no folder {path.parent}: create it")


def save_plot(results: Results, path: Path) -> None:
    """Right actions of the weakest intents, accepted drafts by position, skipped work by layer: what there is of them.
    `path` has passed check_plot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts: list[Callable[[Any], None]] = []
    if results.commands and results.commands.groups:
        parts.append(partial(_groups, groups=results.commands.groups))
    if results.drafts:
        parts.append(partial(_drafts, drafts=results.drafts))
    if results.skipped:
        parts.append(partial(_skipped, skipped=results.skipped))
    figure = Figure(figsize=(1 + 5 * max(1, len(parts)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{results.bundle}, {results.suite}{_perplexity(results)}", fontsize=10)
    for n, draw in enumerate(parts, start=1):
        draw(figure.add_subplot(1, len(parts), n))
    figure.savefig(path, dpi=120)


def _perplexity(results: Results) -> str:
    return f", perplexity {results.texts.perplexity.value:.2f}" if results.texts else ""


def _groups(axes, groups: dict[str, tuple[int, float]]) -> None:
    worst = sorted(groups.items(), key=lambda item: item[1][1])[:WEAKEST][::-1]
    axes.barh([f"{name or 'all'} ({count})" for name, (count, _) in worst], [share for _, (_, share) in worst])
    axes.set(title="right actions, %, weakest intents", xlim=(0, 100))
    axes.tick_params(labelsize=7)


def _drafts(axes, drafts: dict[str, Drafts]) -> None:
    for kind, found in drafts.items():
        shares = [100 * share for share in found.by_position]
        axes.plot(range(1, len(shares) + 1), shares, "o-", label=f"{kind}: {found.length.value:.2f} tokens a step")
    axes.set(title="drafts accepted up to position, %", xlabel="position", ylim=(0, 100))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8)


def _skipped(axes, skipped: dict[str, tuple[float, ...]]) -> None:
    for sort, layers in skipped.items():
        axes.plot(range(len(layers)), layers, "o-", label=f"{sort}: {sum(layers) / len(layers):.0f} % in all")
    axes.set(title="feed-forward blocks skipped, %", xlabel="gated layer", ylim=(0, 100))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8)
