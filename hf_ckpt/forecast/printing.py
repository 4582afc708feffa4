"""Prints an answer, or the comparison of two trainings, as text. Importing it does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_ckpt.console import print_plain
from hf_ckpt.forecast.result import HEADS, Forecast, ForecastRow
from hf_ckpt.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console


class Printer:
    """Prints an answer as its parts come. Long lines are not wrapped.

    Args:
        console: where it is printed.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._heading: tuple[str, ...] = ()
        """What is printed before the next row."""
        self._notes: tuple[str, ...] = ()
        """The notes that are printed already."""

    def show(self, forecast: Forecast) -> None:
        """Print whether it fits, what to copy, the plan, what fills its peak, and the rows so far."""
        print_plain(self._console, forecast.verdict, style="bold")
        lines = [forecast.assumed, *(f"note: {note}" for note in forecast.notes)]
        for title, text in forecast.write.items():
            lines += ["", f"{title}:", *(f"  {line}" for line in text.splitlines())]
        if forecast.plan:
            lines += ["", str(forecast.plan)]
        parts = [f"  {format_bytes(size):>10}  {name}" for name, size in forecast.parts.items() if size]
        lines += ["", f"{'' if forecast.plan else 'lowest '}peak: {format_bytes(forecast.peak_bytes)}", *parts]
        lines += [*forecast.left, ""]
        print_plain(self._console, *lines)
        self._notes = forecast.notes
        heading = "ways to train it; all figures are predicted"
        if not forecast.plan:
            budget = format_bytes(forecast.budget_bytes)
            heading = f"what fits into {budget} with a change; each row is the fastest plan"
        self._heading = heading, _line(HEADS)
        for row in forecast.rows:
            self.add(row)
        self._console.file.flush()  # to a pipe, too: what follows may take longer

    def add(self, row: ForecastRow) -> None:
        """Print a row."""
        print_plain(self._console, *self._heading, _line(row.cells()))
        self._heading = ()
        self._console.file.flush()

    def end(self, forecast: Forecast) -> None:
        """Print the notes that are known only at the end."""
        print_plain(self._console, *(f"note: {note}" for note in forecast.notes if note not in self._notes))


def _line(cells: Sequence[str]) -> str:
    """The columns of `HEADS` as a line. Names and options, whose longest is not known before, are at the end."""
    name, options, peak, step, speed, fits = cells
    return f"  {peak:>10}  {step:>9}  {speed:>9}  {fits:>4}  {name}{': ' if options else ''}{options}"


def print_comparison(comparison: Mapping[str, Any], console: Console) -> None:
    """Print what `forecast.comparison` returns: what fills two peaks, and how far each change leads to the other."""
    from rich.table import Column, Table

    for heading, names in (("what fills the lowest peak", "parts"), ("the first with one change", "changes")):
        rows = comparison[names]
        if not rows:
            continue
        print_plain(console, heading)
        titles = ("first", "second", "difference") if names == "parts" else ("lowest peak", "difference")
        table = Table("", *(Column(title, justify="right") for title in titles))
        for name, *sizes in rows:
            first = comparison["peaks"][0] if names == "changes" else sizes[0]
            table.add_row(name, *map(format_bytes, sizes), format_bytes(sizes[-1] - first))
        console.print(table)
