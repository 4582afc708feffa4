"""Prints answers on a console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_ckpt.forecast.answers import Answer, Table

if TYPE_CHECKING:
    from rich.console import Console


def print_answer(answer: Answer, console: Console, plan: str = "") -> None:
    """Print whether it fits, what to copy, the plan, its tables, and remarks. Long lines are not wrapped."""

    def line(text: str, style: str | None = None) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True, style=style)

    line(answer.headline, "bold")
    line(answer.assumed)
    for title, text in answer.copies:
        line(f"\n{title}:")
        for each in text.splitlines():
            line(f"  {each}")
    if plan:
        line(f"\n{plan}")
    for table in answer.tables:
        print_table(table, console)
    for remark in answer.remarks:
        line(remark)
    console.file.flush()


def print_table(table: Table, console: Console) -> None:
    """Print a table. The first column, and one of options, are left-aligned."""
    from rich.table import Table as RichTable
    from rich.text import Text

    console.print(f"\n{table.title}", highlight=False, markup=False, soft_wrap=True)
    found = RichTable()
    for place, head in enumerate(table.heads):
        found.add_column(head, justify="left" if not place or head == "options to add" else "right")
    for row in table.rows:
        found.add_row(*map(Text, row))
    console.print(found)
