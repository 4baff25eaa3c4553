"""JSON values to typed ones: each function returns the value or raises ``ValueError`` saying what was expected.

``NotImplementedValue`` is the same for a value that is understood but that nothing here implements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Convert = Callable[[Any], Any]

MAX_INT = 2**31 - 1  # ids, widths and counts are int32 everywhere below the checkpoint


class NotImplementedValue(ValueError):
    """The value means something, but not something this package does."""


class Unread(Exception):
    """A value was asked for that could not be read; its absence has been reported already."""


class Values(dict[str, Any]):
    """Resolved values by name. Reading one that could not be resolved raises ``Unread``, which skips the reader."""

    def __missing__(self, name: str) -> Any:
        raise Unread(name)


def integer(low: int, high: int = MAX_INT) -> Convert:
    """An integer in [low, high]; true and 1.5 are none, 8.0 is none either."""

    def convert(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return value

    return convert


def number(low: float, *, exclusive: bool = True) -> Convert:
    """A number above ``low`` (or equal to it, when not exclusive) that float32 can hold."""

    def convert(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_zero = value == low == 0 and not exclusive
        if not is_number or not (is_zero or (max(low, 1e-30) < value <= 1e30) or (value == low and not exclusive)):
            raise ValueError(f"a number {'above' if exclusive else 'of at least'} {low:g} that float32 can hold")
        return float(value)

    return convert


def boolean(value: Any) -> bool:
    """True or false; 0 and 1 are numbers."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def text(*allowed: str) -> Convert:
    """One of a few words; any other word means something that is not implemented."""

    def convert(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(" or ".join(allowed))
        if value not in allowed:
            raise NotImplementedValue(" or ".join(allowed))
        return value

    return convert


def only(expected: int) -> Convert:
    """The single integer that is implemented."""

    def convert(value: Any) -> int:
        if integer(1)(value) != expected:
            raise NotImplementedValue(f"{expected}")
        return expected

    return convert


def rank(low: int) -> Convert:
    """A low-rank width: a multiple of 8 up to 256, or 0 where ``low`` allows a head without it."""

    def convert(value: Any) -> int:
        found: int = integer(low)(value)
        if found % 8 or found > 256:
            raise NotImplementedValue("a multiple of 8 up to 256")
        return found

    return convert


def integers(first: int = 0) -> Convert:
    """A non-empty list of integers that count from ``first``; returned counting from 0, in order."""

    def convert(value: Any) -> tuple[int, ...]:
        plain = isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        if not plain or not 0 < len(value) <= 64 or any(abs(v) > MAX_INT for v in value):
            raise ValueError("a list of 1 to 64 layer numbers")
        return tuple(v - first for v in value)

    return convert


def words(allowed: Sequence[str]) -> Convert:
    """A list of words out of a few."""

    def convert(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ValueError(f"a list of {' or '.join(allowed)}")
        if any(v not in allowed for v in value):
            raise NotImplementedValue(f"a list of {' or '.join(allowed)}")
        return tuple(value)

    return convert
