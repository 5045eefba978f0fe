"""The figure that most experiments draw: scores over the share of entries, beside those of whole models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from forgetfree.jobs.experiments.rows import Row, distinct, mean
from forgetfree.results.report.figures import curves, legend, look


def scores_over_sparsity(
    rows: Sequence[Row],
    line: str,
    lines: Sequence[str],
    *,
    dashed: Mapping[str, Mapping[str, Any]],
    dotted: Mapping[str, Mapping[str, Any]] | None = None,
    share: str = "graft",
) -> Figure:
    """Draw a panel for each task: lines of the score (%) over sparsity, and levels that have no sparsity.

    Args:
        rows: tidy rows with ``task``, ``sparsity`` and ``score``.
        line: the key whose values are the lines.
        lines: which of them, in order.
        dashed: name of a level → the columns and values of its rows, such as ``{"fine-tuned": {"model": "fine-tuned"}}``;
            a level that is named as a line has its colour.
        dotted: the same.
        share: what the share along the axis is of, such as ``"region"``.
    """
    levels = [*dashed.values(), *(dotted or {}).values()]
    points = [row for row in rows if not any(row.items() >= where.items() for where in levels)]
    figure, axes = curves(points, "task", "sparsity", "score", line, lines)
    for ax, task in zip(axes, distinct(points, "task"), strict=True):
        for named, style in ((dashed, "--"), (dotted or {}, ":")):
            for name, where in named.items():
                level = 100 * mean(rows, "score", task=task, **where)
                ax.axhline(level, color=look(name)["color"], ls=style, lw=0.8 if name in lines else 1.5, label=name)
        ax.set_xlabel(f"share of parameters in the {share}")
    axes[0].set_ylabel("score (%)" if not set(dashed) & set(lines) else "score (%); dashed: fine-tuned")
    legend(figure, axes)
    return figure
