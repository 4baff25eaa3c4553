"""Tiny engines on disk, and their sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny import write_checkpoint
from trtllm_dflash.config import BuildOptions
from trtllm_dflash.engine.manifest import Engine
from trtllm_dflash.pipeline import build_engine

SMALL: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 256, "max_num_tokens": 32, "tokens_per_block": 16}


def tiny_engine(directory: Path, options: dict[str, Any] | None = None, **checkpoint: Any) -> Engine:
    """Write a tiny checkpoint and build it; ``options`` are fields of BuildOptions beyond SMALL."""
    source = write_checkpoint(directory / "checkpoint", **checkpoint)
    return build_engine(source, directory / "engine", BuildOptions(**{**SMALL, **(options or {})}))
