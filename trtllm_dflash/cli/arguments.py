"""Argument types: what argparse checks before a verb runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

PLACES = "directory, .gguf file or package:NAME"  # where a target may lie


def directory(text: str) -> Path:
    """A path; an empty string, as an unset variable gives, is none."""
    return Path(given(text))


def given(text: str) -> str:
    """Any text but the empty one."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    return text


def positive(text: str) -> int:
    """An integer of at least 1."""
    return _integer(text, 1, 2**63 - 1)


def seed(text: str) -> int:
    """A seed of a random generator."""
    return _integer(text, 0, 2**63 - 1)


def threads(text: str) -> int:
    """A number of threads that this machine can run."""
    return _integer(text, 1, os.cpu_count() or 1)


def _integer(text: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"is {value}, expected {low} to {high}")
    return value
