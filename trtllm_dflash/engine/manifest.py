"""``config.json`` of an engine directory: what the engine is, what it was made from, and the checks on opening it.

Nothing is deserialized before every stamp has been compared; one message names all differences and the command that
rebuilds. ``digest`` covers the manifest itself, so an edited value is a difference like any other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import BuildOptions, DrafterConfig
from ..errors import BuildError, EngineMismatchError, Problems
from ..io_spec import MODELS
from ..limits import Limits
from .weight_file import WEIGHTS_NAME

FORMAT_VERSION = 1
MANIFEST_NAME = "config.json"
_MAX_MANIFEST_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Engine:
    """An engine directory whose manifest and files have been checked."""

    directory: Path
    config: DrafterConfig
    options: BuildOptions
    limits: Limits
    rendering: str
    drafter_sha256: str
    target: dict[str, Any] | None  # the TargetSpec that the build was checked against, if any


def write_manifest(
    directory: Path,
    config: DrafterConfig,
    options: BuildOptions,
    *,
    rendering: str,
    package_version: str,
    drafter_sha256: str,
    target: dict[str, Any] | None,
    files: Iterable[Path],
) -> None:
    """Write the manifest over finished files."""
    values: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "pretrained_config": config.to_json(),
        "build_config": dataclasses.asdict(options),
        "trtllm_dflash": {
            "package_version": package_version,
            "rendering": rendering,
            "drafter_sha256": drafter_sha256,
            "target": target,
            "files": {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in files},
        },
    }
    values["trtllm_dflash"]["digest"] = _digest(values)
    (directory / MANIFEST_NAME).write_text(json.dumps(values, indent=2) + "\n")


def is_engine_directory(directory: Path) -> bool:
    """Whether ``directory`` holds a manifest of ours, of any version."""
    path = directory / MANIFEST_NAME
    try:
        values = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and isinstance(values.get("trtllm_dflash"), dict)


def open_engine(directory: Path | str) -> Engine:
    """Check an engine directory and return what it holds. Reads every file once, for its SHA-256.

    Raises:
        EngineMismatchError: missing, truncated, edited or foreign files, or another format version.
    """
    directory = Path(directory)
    rebuild = f"rebuild: trtllm-dflash build --checkpoint_dir ... --output_dir {directory}"
    values = _read_manifest(directory, rebuild)
    try:
        engine, files = _interpret(directory, values)
    except (KeyError, TypeError, ValueError, AttributeError, BuildError) as error:
        raise EngineMismatchError(
            f"{directory}: the manifest is not of this version's form ({type(error).__name__}: {error}); {rebuild}"
        ) from error
    problems = Problems(str(directory), rebuild)
    for name, size, sha256 in files:
        _check_file(directory / name, size, sha256, problems)
    problems.raise_as(EngineMismatchError)
    return engine


def _interpret(directory: Path, values: dict[str, Any]) -> tuple[Engine, list[tuple[str, int, str]]]:
    """The engine that a manifest describes, and its files with their sizes and hashes."""
    stamps = values["trtllm_dflash"]
    files = [(name, int(entry["bytes"]), str(entry["sha256"])) for name, entry in stamps["files"].items()]
    names = {name for name, _, _ in files}
    if strangers := [name for name in names if Path(name).name != name]:
        raise ValueError(f"file {strangers[0]!r} is not in the directory")
    if missing := {WEIGHTS_NAME, *(f"{model}.onnx" for model in MODELS)} - names:
        raise ValueError(f"files without {', '.join(sorted(missing))}")
    config = DrafterConfig.from_json(values["pretrained_config"])
    options = BuildOptions(**values["build_config"])
    engine = Engine(
        directory=directory,
        config=config,
        options=options,
        limits=Limits.of(options, config),
        rendering=stamps["rendering"],
        drafter_sha256=stamps["drafter_sha256"],
        target=stamps["target"],
    )
    return engine, files


def _read_manifest(directory: Path, rebuild: str) -> dict[str, Any]:
    def refuse(problem: str) -> EngineMismatchError:
        return EngineMismatchError(f"{directory}: {problem}; {rebuild}")

    path = directory / MANIFEST_NAME
    if not directory.is_dir():
        raise refuse("found no such directory, expected an engine directory")
    if not path.is_file() or path.is_symlink():
        raise refuse(f"found no regular file {MANIFEST_NAME}, expected the manifest that a build writes")
    if (size := path.stat().st_size) > _MAX_MANIFEST_BYTES:
        raise refuse(f"{MANIFEST_NAME} has {size} bytes, expected at most {_MAX_MANIFEST_BYTES}")
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise refuse(f"{MANIFEST_NAME} is not JSON ({error})") from error
    except OSError as error:
        raise refuse(f"{MANIFEST_NAME} cannot be read ({error.strerror})") from error
    if not isinstance(values, dict) or not isinstance(values.get("trtllm_dflash"), dict):
        raise refuse(
            f"{MANIFEST_NAME} has no 'trtllm_dflash' section; this is not an engine directory"
            " (a checkpoint directory is what --checkpoint_dir takes)"
        )
    if values.get("version") != FORMAT_VERSION:
        raise refuse(f"format version is {values.get('version')}, this package reads {FORMAT_VERSION}")
    found, expected = values["trtllm_dflash"].get("digest"), _digest(values)
    if found != expected:
        raise refuse(f"{MANIFEST_NAME} was edited: its digest says {found}, its content gives {expected}")
    return values


def _check_file(path: Path, size: int, sha256: str, problems: Problems) -> None:
    if path.is_symlink():
        problems.add(f"{path.name} is a symbolic link, expected a regular file (ONNX Runtime refuses links)")
    elif not path.is_file():
        problems.add(f"{path.name} is missing, expected {size} bytes")
    elif (found := path.stat().st_size) != size:
        problems.add(f"{path.name} has {found} bytes, the build wrote {size}")
    elif not os.access(path, os.R_OK):
        problems.add(f"{path.name} cannot be read, expected read permission")
    elif (digest := file_sha256(path)) != sha256:
        problems.add(f"{path.name} has SHA-256 {digest[:12]}.., the build wrote {sha256[:12]}..")


def _digest(values: dict[str, Any]) -> str:
    stamps = {key: value for key, value in values["trtllm_dflash"].items() if key != "digest"}
    canonical = json.dumps({**values, "trtllm_dflash": stamps}, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, streamed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
