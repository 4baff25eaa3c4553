"""The errors of this package, and the collector that reports every problem of an input in one message.

A message says where, what was found, what was expected, and what to do. The command line prints a ``DFlashError``
as it is and exits with 2; any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

_MAX_LISTED = 40  # lines of one message; a file of another kind would fill thousands


class DFlashError(Exception):
    """Base of every error that this package raises on purpose."""


class CheckpointError(DFlashError):
    """A drafter checkpoint is missing something, contradicts itself, or holds what nothing consumes."""


class UnsupportedError(DFlashError):
    """Understood, but not implemented."""


class BuildError(DFlashError):
    """An engine could not be made from a checkpoint that is sound."""


class EngineMismatchError(DFlashError):
    """An engine directory does not fit this machine, library, drafter or target."""


class KernelError(DFlashError):
    """A kernel's C ABI returned a failure status."""


class ContractError(DFlashError):
    """A host (TensorRT-LLM, Triton) differs from the recorded contract."""


class Problems:
    """Collects refusals, so that one message names all of them."""

    def __init__(self, subject: str, remedy: str = "") -> None:
        self.subject = subject
        self.remedy = remedy  # what to do about any of them, said once
        self._found: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, problem: str) -> None:
        """Note one problem: where, found, expected, what to do."""
        if problem not in self._found:
            self._found.append(problem)

    def check(self, condition: bool, problem: str) -> bool:
        """Note ``problem`` unless ``condition`` holds; returns the condition."""
        if not condition:
            self.add(problem)
        return condition

    def raise_as(self, error: type[DFlashError]) -> None:
        """Raise ``error`` with every problem noted so far; do nothing when there is none."""
        if len(self._found) == 1:
            remedy = f"; {self.remedy}" if self.remedy else ""
            raise error(f"{self.subject}: {self._found[0]}{remedy}")
        if self._found:
            listing = "\n".join(f"  - {problem}" for problem in self._found[:_MAX_LISTED])
            more = len(self._found) - _MAX_LISTED
            listing += f"\n  - and {more} more" if more > 0 else ""
            remedy = f"\n  {self.remedy}" if self.remedy else ""
            raise error(f"{self.subject}: {len(self._found)} problems\n{listing}{remedy}")
