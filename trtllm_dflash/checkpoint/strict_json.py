"""JSON objects as a checkpoint must hold them: one meaning a key, finite numbers, UTF-8."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError naming the file for anything else."""
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a regular file; expected a JSON object")
    try:
        content = json.loads(
            path.read_bytes().decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); expected a JSON object") from error
    except RecursionError as error:
        raise CheckpointError(f"{path}: nested too deeply; expected a JSON object of a few levels") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); expected one object in UTF-8") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}; expected a JSON object")
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"key given twice: {', '.join(name for name in counts if counts[name] > 1)}")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(f"{literal} is too large for a number")
    return value
