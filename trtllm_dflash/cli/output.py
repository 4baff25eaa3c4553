"""How the verbs print: tables for people, one JSON object for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

log = Console(stderr=True, highlight=False)


class Output(Console):
    """Standard output. A reader that leaves, as `| head` does, is left to ``main``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, **options)

    def on_broken_pipe(self) -> NoReturn:
        """Rich would end the process with the exit code of a difference."""
        raise BrokenPipeError


def print_json(values: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps(values, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table on stdout; numbers are right-aligned and never broken. Nothing is printed without rows."""
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        return
    output = Output()
    output.print(title)
    table = Table()
    for index, column in enumerate(columns):
        values = [row[index] for row in cells]
        numeric = all(value[:1].isdigit() or value in ("", "-") for value in values)
        width = max(map(len, values)) if numeric else None
        table.add_column(column, justify="right" if numeric else "left", min_width=width, overflow="fold")
    for row in cells:
        table.add_row(*row)
    output.print(table)


def _cell(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def size(num_bytes: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
