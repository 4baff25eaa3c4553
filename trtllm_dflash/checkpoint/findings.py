"""The problems of one checkpoint, told apart: wrong, or understood and not implemented."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import CheckpointError, Problems, UnsupportedError

_SHOWN = 6  # names in one message; a file of another model would print hundreds


class Findings(Problems):
    """``Problems`` whose error type is UnsupportedError only when nothing is wrong otherwise."""

    def __init__(self, subject: str) -> None:
        super().__init__(subject)
        self._wrong = False

    def add(self, problem: str) -> None:
        """Note something missing, wrong, contradictory or left over."""
        self._wrong = True
        super().add(problem)

    def unsupported(self, problem: str) -> None:
        """Note something that is sound but not implemented."""
        super().add(problem)

    def raise_all(self) -> None:
        """Raise everything found in one error; do nothing when nothing was found."""
        self.raise_as(CheckpointError if self._wrong else UnsupportedError)


def listed(names: Iterable[str]) -> str:
    """A few of the names and how many more there are."""
    ordered = list(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more
