"""Measured values as a table, as JSON, and as a chart."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from project.measure.bench.machine import describe_line
from project.report.table import Column, paragraph, table_lines
from project.runtime.files import replacing, write_text


@dataclass
class Table:
    """Columns with their units, and rows of a name and its cells, as they are shown."""

    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def lines(self) -> list[str]:
        return table_lines([Column(title, right=number > 0) for number, title in enumerate(self.columns)], self.rows)


@dataclass
class Results:
    """Of one benchmark.

    Attributes:
        title: What was measured.
        machine: The machine, as `machine.describe` describes it.
        unit: Unit of the samples.
        samples: Values of each contestant, one for each round, for the chart and the JSON.
        tables: Tables for the terminal.
        notes: Lines below them.
        values: Whatever else was measured, for the JSON.
    """

    title: str
    machine: dict[str, str]
    unit: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Half of the distance between the quartiles, as a share of the median."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / statistics.median(values)


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """The median of a's values over b's of the same round: what slows both down for a while falls out."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def lines(results: Results) -> list[str]:
    """At most 80 columns, but for names of machines."""
    found = [results.title, describe_line(results.machine)]
    for table in results.tables:
        found += ["", *table.lines()]
    return [*found, "", *(line for note in results.notes for line in paragraph(note, width=80, more="  "))]


def save_json(results: Results, path: Path) -> None:
    content = asdict(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=1) + "\n")


def save_chart(results: Results, path: Path) -> None:
    """Each contestant's values as dots over a bar of their median."""
    from matplotlib.figure import Figure

    names = list(results.samples)
    figure = Figure(figsize=(8, 1.1 + 0.42 * len(names)), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(names):
        values = results.samples[name]
        axes.barh(place, median(values), height=0.6, color="C0", alpha=0.35)
        axes.plot(values, [place] * len(values), "|", color="C0", markersize=11)
        axes.annotate(f"{median(values):,.4g}", (max(values), place), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(results.unit)
    axes.set_xlim(0, 1.12 * max(max(values) for values in results.samples.values()))
    axes.set_title(results.title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        figure.savefig(partial, format=path.suffix.removeprefix(".") or "png", dpi=120)
