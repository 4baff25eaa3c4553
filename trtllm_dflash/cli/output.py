"""How the verbs print: tables for people, one JSON object for machines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

log = Console(stderr=True, highlight=False)


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is given, expected at least 1")
    return value


def print_json(values: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps(values, indent=2, default=str))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table on stdout; numbers are right-aligned."""
    rows = [[_cell(value) for value in row] for row in rows]
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(row[index][:1].isdigit() or row[index] in ("", "-") for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def _cell(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def mib(num_bytes: float) -> str:
    """Bytes as MiB."""
    return f"{num_bytes / 2**20:,.1f} MiB"
