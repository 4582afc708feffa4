"""Shared by `hf-ckpt demo` and the benchmarks: bitwise comparison of gradients, and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameter name -> gradient, for parameters that have one."""
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def first_difference(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> str | None:
    """Return the first parameter whose gradient differs from the reference, or what is missing; None if none."""
    if not gradients:
        return "no parameter has a gradient"
    if gradients.keys() != reference.keys():
        return f"{len(gradients)} gradients against {len(reference)}"
    return next((name for name, value in gradients.items() if not value.equal(reference[name].to(value.device))), None)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table for the terminal and for Markdown. `left` has the positions of left-aligned columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)

    def show(self, console: Console) -> None:
        """Print the table. Cells are plain text."""
        from rich.markup import escape
        from rich.table import Table as Shown
        from rich.text import Text

        shown = Shown(title=escape(self.title), title_justify="left", pad_edge=False, collapse_padding=True)
        for place, name in enumerate(self.columns):
            shown.add_column(name, justify="left" if place in self.left else "right", no_wrap=place not in self.left)
        for cells in self.rows:
            shown.add_row(*map(Text, cells))
        console.print(shown)

    def markdown(self) -> str:
        """Return the table as Markdown, without its title."""
        heading, *rows = (f"| {' | '.join(cells)} |" for cells in (self.columns, *self.rows))
        return "\n".join((heading, f"|{'---|' * len(self.columns)}", *rows))
