"""Checkpoint directory -> engine directory: one function, in the order in which things happen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from . import __version__
from .checkpoint.parse import Checkpoint, parse_checkpoint
from .checkpoint.weights import layout, load_weights, table_names
from .config import BuildOptions, DrafterConfig, TargetSpec
from .engine.directory import check_output, new_directory
from .engine.manifest import Engine, open_engine, write_manifest
from .engine.weight_file import WEIGHTS_NAME, write_tables, write_weights
from .errors import BuildError, UnsupportedError
from .graph import render
from .io_spec import NUM_CANDIDATES
from .limits import Limits
from .target_check import check_target

Progress = Callable[[str], None]
STEPS = ("read checkpoint", "write weights", "write models", "check files")


def build_engine(
    checkpoint_dir: Path | str,
    output_dir: Path | str,
    options: BuildOptions | None = None,
    *,
    target: TargetSpec | None = None,
    progress: Progress = lambda step: None,
) -> Engine:
    """Build an engine directory from a drafter checkpoint.

    ``target`` has the drafter checked against the model it is meant for, and is noted in the manifest.
    ``progress`` is called with each of ``STEPS`` as it begins.

    Raises:
        CheckpointError: the checkpoint is unsound.
        UnsupportedError: it needs what this version does not build.
        BuildError: the options do not fit it, or the output cannot be written.
        EngineMismatchError: it was not made for ``target``.
    """
    options = options or BuildOptions()
    output_dir = Path(output_dir)
    check_output(output_dir)
    progress(STEPS[0])
    checkpoint = parse_checkpoint(checkpoint_dir)
    plan_build(checkpoint, options, target)
    rendering = render.RENDERINGS[options.runtime]
    with new_directory(output_dir) as directory:
        progress(STEPS[1])
        tensors = load_weights(checkpoint)
        tables = {name: tensors.pop(name) for name in table_names(checkpoint.config)}
        table_files = write_tables(tables, directory)
        weights = write_weights(tensors, directory)
        progress(STEPS[2])
        models = render.render(rendering, checkpoint.config, options.dtype, weights)
        model_files = render.write(models, directory)
        progress(STEPS[3])
        write_manifest(
            directory,
            checkpoint.config,
            options,
            rendering=rendering.name,
            package_version=__version__,
            drafter_sha256=checkpoint.files.sha256(),
            target=None if target is None else dataclasses.asdict(target),
            files=[*model_files, directory / WEIGHTS_NAME, *table_files],
        )
    return open_engine(output_dir)


def plan_build(checkpoint: Checkpoint, options: BuildOptions, target: TargetSpec | None = None) -> Limits:
    """Refuse what cannot be built, before anything is written; returns the resolved sizes."""
    _check_supported(checkpoint.config)
    rendering = render.RENDERINGS.get(options.runtime)
    if rendering is None:
        raise BuildError(f"runtime is {options.runtime!r}, expected one of {', '.join(render.RENDERINGS)}")
    if options.dtype not in rendering.compute_types:
        raise BuildError(
            f"dtype is {options.dtype!r}, but runtime {options.runtime} computes in"
            f" {', '.join(rendering.compute_types)}; choose one of these, or another --runtime"
        )
    limits = Limits.of(options, checkpoint.config)
    if target is not None:
        check_target(checkpoint.config, target)
    return limits


def memory_plan(config: DrafterConfig, limits: Limits, dtype: str) -> dict[str, int]:
    """Bytes that a session of this build will hold, by purpose; the target's own memory is not in it."""
    element, stored = (4 if name == "float32" else 2 for name in (dtype, config.dtype))
    elements = {name: math.prod(shape) for name, shape in layout(config).items()}
    in_tables = sum(elements.pop(name) for name in table_names(config))
    tables = {f"tables of the head in {config.dtype}": stored * in_tables} if in_tables else {}
    return {
        f"weights in {dtype}": element * sum(elements.values()),
        **tables,
        f"context pool, {limits.num_pages} pages of {limits.tokens_per_block} tokens": limits.pool_bytes(
            config, element
        ),
        "context of 1,000 tokens": 1000 * limits.context_bytes_per_token(config, element),
        "logits of one full batch": 4 * limits.max_batch_size * limits.max_draft_len * config.draft_vocab_size,
    }


def _check_supported(config: DrafterConfig) -> None:
    """Raise UnsupportedError for what is parsed and validated but not built yet."""
    missing = {
        "the drafter's own embed_tokens": config.owns_embedding,
        "the drafter's own lm_head": config.owns_lm_head,
        "a reduced draft vocabulary": config.draft_vocab_size != config.vocab_size,
        "a learned mask embedding": config.has_mask_embedding,
    }
    if named := [what for what, is_missing in missing.items() if is_missing]:
        raise UnsupportedError(
            f"checkpoint: needs {', '.join(named)}, which version {__version__} reads and validates but does not build"
        )
    if config.draft_vocab_size < NUM_CANDIDATES:
        raise UnsupportedError(
            f"checkpoint: vocab_size is {config.draft_vocab_size}, expected at least {NUM_CANDIDATES} candidates a row"
        )
