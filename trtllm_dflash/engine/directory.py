"""Writing an engine directory: into a temporary sibling, renamed when complete, so a killed build leaves nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import BuildError
from .manifest import is_engine_directory


@contextlib.contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """A temporary directory that becomes ``output`` when the block ends well and vanishes when it does not.

    An engine directory that stands there is replaced; any other non-empty directory is left alone.

    Raises:
        BuildError: ``output`` exists and is neither empty nor an engine directory, or cannot be written.
    """
    output = output.absolute()
    check_output(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(output)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.{os.getpid()}.", dir=output.parent))
    except OSError as error:
        raise BuildError(f"{output}: cannot write there ({error}); choose another --output_dir") from error
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes it private; an engine is as readable as its parent allows
        if output.is_dir():
            retired = temporary.with_name(f"{temporary.name}.old")
            output.rename(retired)
            temporary.rename(output)
            shutil.rmtree(retired)
        else:
            temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_output(output: Path) -> None:
    """Raise BuildError when a build must not write to ``output``."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise BuildError(f"{output}: found a file or link, expected a directory; choose another --output_dir")
    if output.is_dir() and any(output.iterdir()) and not is_engine_directory(output):
        raise BuildError(
            f"{output}: found a directory with other files in it, expected an engine directory or nothing;"
            " choose another --output_dir"
        )


def _remove_leftovers(output: Path) -> None:
    """Remove what builds to the same place left when they were killed, but not the work of one that still runs."""
    for leftover in output.parent.glob(f".{output.name}.*"):
        pid = leftover.name.removeprefix(f".{output.name}.").split(".")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(leftover, ignore_errors=True)
