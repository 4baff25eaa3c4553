"""Writing an engine directory: into a temporary sibling, renamed when complete, so a killed build leaves nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import BuildError
from .manifest import is_engine_directory

_RETIRED = ".old"


@contextlib.contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """A temporary directory that becomes ``output`` when the block ends well and vanishes when it does not.

    An engine directory that stands there is replaced; any other non-empty directory is left alone.

    Raises:
        BuildError: ``output`` exists and is neither empty nor an engine directory, or cannot be written.
    """
    output = absolute(output)
    check_output(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(output)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        with _locked(temporary):
            try:
                yield temporary
                _publish(temporary, output)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise BuildError(
            f"{output}: cannot be written ({error}); make room there or choose another --output_dir"
        ) from error


def absolute(output: Path) -> Path:
    """The place that a path names, however it is spelled; symbolic links are kept, so that they can be refused."""
    return Path(os.path.abspath(output))


def check_output(output: Path) -> None:
    """Raise BuildError when a build must not write to ``output``."""
    output = absolute(output)
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise BuildError(f"{output}: found a file or link, expected a directory; choose another --output_dir")
    if Path.cwd().is_relative_to(output):
        raise BuildError(
            f"{output}: is the current directory or above it, and a build replaces what it writes to;"
            " choose another --output_dir"
        )
    if output.is_dir() and any(output.iterdir()) and not is_engine_directory(output):
        raise BuildError(
            f"{output}: found a directory with other files in it, expected an engine directory or nothing;"
            " choose another --output_dir"
        )


def _publish(temporary: Path, output: Path) -> None:
    """Rename a finished directory into place; an engine that is there first steps aside."""
    for path in temporary.iterdir():
        path.chmod(0o644)
    temporary.chmod(0o755)  # mkdtemp makes it private; an engine is as readable as its parent allows
    if not output.is_dir():
        temporary.rename(output)
        return
    retired = temporary.with_name(temporary.name + _RETIRED)
    output.rename(retired)
    temporary.rename(output)
    shutil.rmtree(retired)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a lock on the directory, which ends with this process however it ends."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _remove_leftovers(output: Path) -> None:
    """Clear away what killed builds to the same place left, but not the work of one that still runs.

    A build that was killed between its two renames has left the old engine aside: it is put back.
    """
    for leftover in sorted(output.parent.glob(f".{output.name}.*")):
        if leftover.name.endswith(_RETIRED):
            if not output.exists() and is_engine_directory(leftover):
                leftover.rename(output)
            else:
                shutil.rmtree(leftover, ignore_errors=True)
            continue
        with contextlib.suppress(OSError), _locked(leftover):  # a running build holds the lock
            shutil.rmtree(leftover, ignore_errors=True)
