"""docs/promises.md names tests; they must exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_T\w+)`", (ROOT / "docs" / "promises.md").read_text()))
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_T\w+)", path.read_text())
    }
    assert named
    assert not named - written


def test_every_test_named_by_a_row_is_on_the_page() -> None:
    page = (ROOT / "docs" / "promises.md").read_text()
    rows = set(re.findall(r"T\d\d", page))
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"def test_(T\w+)", path.read_text()):
            missing = set(re.findall(r"T\d\d", name)) - rows
            assert not missing, f"{path.name}: test_{name} belongs to rows that the page does not list: {missing}"
