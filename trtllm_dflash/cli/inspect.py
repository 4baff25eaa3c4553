"""``trtllm-dflash inspect``: what a checkpoint or an engine directory holds, as resolved."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ..config import DrafterConfig
from .output import print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--checkpoint_dir", type=Path, help="Hugging Face drafter checkpoint")
    place.add_argument("--engine_dir", type=Path, help="engine directory that build wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the resolved drafter and, of an engine, its build."""
    config, facts = _checkpoint(args.checkpoint_dir) if args.checkpoint_dir else _engine(args.engine_dir)
    if args.json:
        print_json({"drafter": config.to_json(), **facts})
        return 0
    print_table("Drafter", ("field", "value"), _config_rows(config))
    print_table("Checkpoint" if args.checkpoint_dir else "Engine", ("what", "value"), facts.items())
    return 0


def _checkpoint(directory: Path) -> tuple[DrafterConfig, dict[str, Any]]:
    from ..checkpoint.parse import parse_checkpoint

    checkpoint = parse_checkpoint(directory)
    return checkpoint.config, {
        "directory": str(directory),
        "tensors": len(checkpoint.files.headers),
        "parameters": checkpoint.num_parameters,
        "sha256": checkpoint.files.sha256(),
        "notes": list(checkpoint.notes),
    }


def _engine(directory: Path) -> tuple[DrafterConfig, dict[str, Any]]:
    from ..engine.manifest import open_engine

    engine = open_engine(directory)
    return engine.config, {
        "directory": str(directory),
        "rendering": engine.rendering,
        "drafter_sha256": engine.drafter_sha256,
        "target": engine.target,
        **{f"build.{name}": value for name, value in dataclasses.asdict(engine.options).items()},
        **{f"limits.{name}": value for name, value in dataclasses.asdict(engine.limits).items()},
    }


def _config_rows(config: DrafterConfig) -> list[tuple[str, Any]]:
    rows = [(name, value) for name, value in vars(config).items() if name != "layer_masks"]
    masks = {
        f"{'window ' + str(mask.window) if mask.window else 'full'}, {'causal' if mask.causal else 'not causal'}"
        for mask in config.layer_masks
    }
    rows.append(("layer_masks", " | ".join(sorted(masks))))
    return rows
