"""``trtllm-dflash inspect``: what a checkpoint or an engine directory holds, as resolved."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..config import DrafterConfig
from .arguments import directory
from .output import print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--checkpoint_dir", type=directory, help="Hugging Face drafter checkpoint")
    place.add_argument("--engine_dir", type=directory, help="engine directory that build wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the resolved drafter and, of an engine, its build."""
    config, facts = _checkpoint(args.checkpoint_dir) if args.checkpoint_dir else _engine(args.engine_dir)
    if args.json:
        print_json({"drafter": config.to_json(), **facts})
        return 0
    print_table("Drafter", ("field", "value"), _rows({**config.to_json(), "layer_masks": _masks(config)}))
    print_table("Checkpoint" if args.checkpoint_dir else "Engine", ("what", "value"), _rows(facts))
    return 0


def _checkpoint(folder: Path) -> tuple[DrafterConfig, dict[str, Any]]:
    from ..checkpoint.parse import parse_checkpoint

    checkpoint = parse_checkpoint(folder)
    return checkpoint.config, {
        "directory": str(folder),
        "tensors": len(checkpoint.files.headers),
        "parameters": checkpoint.num_parameters,
        "sha256": checkpoint.files.sha256(),
        "notes": list(checkpoint.notes),
    }


def _engine(folder: Path) -> tuple[DrafterConfig, dict[str, Any]]:
    from ..engine.manifest import open_engine

    engine = open_engine(folder)
    return engine.config, {
        "directory": str(folder),
        "rendering": engine.rendering,
        "drafter_sha256": engine.drafter_sha256,
        "target": engine.target,
        "build": dataclasses.asdict(engine.options),
        "limits": dataclasses.asdict(engine.limits),
    }


def _rows(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values as dotted names, lists as one line each or, of numbers, as one row."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _rows(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(item, str) for item in value):
            yield from ((f"{prefix}{name}" if i == 0 else "", item) for i, item in enumerate(value))
        elif isinstance(value, list | tuple):
            yield f"{prefix}{name}", ", ".join(map(str, value))
        else:
            yield f"{prefix}{name}", "-" if value is None else value


def _masks(config: DrafterConfig) -> list[str]:
    """Runs of layers that see alike."""
    runs: list[tuple[int, int, str]] = []
    for layer, mask in enumerate(config.layer_masks):
        sees = f"{f'window {mask.window}' if mask.window else 'full'}, {'causal' if mask.causal else 'not causal'}"
        if runs and runs[-1][2] == sees:
            runs[-1] = (runs[-1][0], layer, sees)
        else:
            runs.append((layer, layer, sees))
    return [
        f"layer {first}: {sees}" if first == last else f"layers {first}-{last}: {sees}" for first, last, sees in runs
    ]
