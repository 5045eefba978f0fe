"""Where in the model a skill lies. Figures 9 and 10 of the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paper.context import Context
from benchmarks.paper.experiment import Claim, Experiment, main
from benchmarks.paper.plots import panels
from benchmarks.paper.rows import Row, Unit, distinct, mean, pivot, ratio, verdict
from benchmarks.paper.setting import SMALL
from forgetfree.core.families import layer_of, role_of
from forgetfree.core.regions import Region, distribution
from forgetfree.results.report.figures import legend, styles
from forgetfree.results.report.page import Table, percent

BY = {"layer": layer_of, "kind": role_of}
#: The most frequent kinds in figure 10.
KINDS_OF_CLAIM = ("value", "first feed-forward", "LayerNorm")


class Where(Experiment):
    """Count a region's entries by layer and by kind of parameter."""

    name: ClassVar = "where"
    paper: ClassVar = "figures 9 and 10"
    single: ClassVar = ("shots", "sparsities")
    question: ClassVar = "In which layers, and in which kinds of parameters, do the regions lie?"
    setting: ClassVar = replace(SMALL, sparsities=(1e-3,))

    def measure(self, context: Context, unit: Unit) -> list[Row]:
        """Measure the shares of the learned region and of the whole parameter space."""
        tuned = context.tuned(unit)
        (region,), space = tuned.learned(context.setting.sparsity), tuned.bench.space
        whole = Region(torch.arange(len(space)))
        rows = []
        for by, group_of in BY.items():
            held, all_of = (distribution(each, space, group_of) for each in (region, whole))
            rows += [
                {"by": by, "group": group, "share": held[group] / len(region), "of_model": all_of[group] / len(space)}
                for group in all_of
            ]
        return rows

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Return shares by layer and by kind, with one column per task."""
        return [
            pivot(
                f"Share of the region by {by}",
                [row for row in rows if row["by"] == by],
                "group",
                {
                    **{task: ("share", {"task": task}) for task in distinct(rows, "task")},
                    "share of all graftable": ("of_model", {"task": rows[0]["task"], "seed": rows[0]["seed"]}),
                },
            )
            for by in BY
        ]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Return claims on value, first feed-forward layer and LayerNorm together, and on the middle layers."""
        groups = distinct([row for row in rows if row["by"] == "kind"], "group")
        kinds = [[group for group in groups if group.startswith(kind)] for kind in KINDS_OF_CLAIM]
        held, size = (  # GPT-2 has no separate tensor of values: undecided
            sum(mean(rows, key, by="kind", group=group) for each in kinds for group in each) if all(kinds) else math.nan
            for key in ("share", "of_model")
        )
        layers = [
            group for group in distinct([row for row in rows if row["by"] == "layer"], "group") if group.isdigit()
        ]
        middle = layers[len(layers) // 3 : -(len(layers) // 3) or None]
        inside = sum(mean(rows, "share", by="layer", group=layer) for layer in middle) if middle else math.nan
        return [
            Claim(
                "value, first feed-forward layer and LayerNorm hold most of the region, and more than their size",
                "—",
                f"{percent(held)} of the region, {percent(size)} of all graftable entries",
                verdict(held > 0.5 and held > size, held, size),
            ),
            Claim(
                "the middle layers hold more than their size",
                "—",
                f"{percent(inside)} of the region in {len(middle)} of {len(layers)} layers",
                verdict(inside > ratio(len(middle), len(layers)), inside, ratio(len(middle), len(layers))),
            ),
        ]

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw shares by layer (figure 9) and by kind (figure 10), with one line per task."""
        figure, (axes,) = panels(["by layer", "by kind of parameter"], width=4.2, height=3.4, share_y=False)
        for ax, by in zip(axes, BY, strict=True):
            those = [row for row in rows if row["by"] == by]
            groups = distinct(those, "group")
            places = list(range(len(groups)))

            def draw(
                shares: list[float], label: str, ax: Axes = ax, by: str = by, at: list[int] = places, **style: Any
            ) -> None:
                along = (at, shares) if by == "layer" else (shares, at)
                ax.plot(
                    *along, label=label, **(style | ({} if by == "layer" else {"linestyle": ""}))
                )  # kinds have no order

            tasks = distinct(rows, "task")
            for task, mark in zip(tasks, styles(len(tasks)), strict=True):
                draw([100 * mean(those, "share", task=task, group=group) for group in groups], task, **mark)
            sizes = [100 * mean(those, "of_model", group=group) for group in groups]
            draw(sizes, "all graftable", color="black", marker="|", markersize=9)
            if by == "layer":
                ax.set_xticks(places, groups)
                ax.set(xlabel="layer", ylabel="share of the region (%)")
            else:
                ax.set_yticks(places, groups)
                ax.invert_yaxis()
                ax.set(xlabel="share of the region (%)")
        legend(figure, axes)
        return figure


if __name__ == "__main__":
    raise SystemExit(main(Where()))
