"""Checkpoint directory -> engine directory: a plan that refuses, then a run that writes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import __version__
from .checkpoint.parse import Checkpoint, parse_checkpoint
from .checkpoint.weights import layout, load_weights, sidecar_names, table_names
from .config import BuildOptions, DrafterConfig, TargetSpec
from .engine.directory import absolute, check_output, new_directory
from .engine.manifest import Engine, open_engine, write_manifest
from .engine.weight_file import WEIGHTS_NAME, write_sidecars, write_weights
from .errors import BuildError, UnsupportedError
from .graph import render
from .io_spec import NUM_CANDIDATES
from .limits import Limits
from .overrides import overridden
from .target_check import check_target

Progress = Callable[[str], None]
STEPS = ("write weights", "write models", "check files")


@dataclass(frozen=True)
class BuildPlan:
    """A build that nothing stands in the way of; nothing has been written yet."""

    checkpoint: Checkpoint
    config: DrafterConfig  # the checkpoint's, with what the options override
    output_dir: Path
    options: BuildOptions
    limits: Limits  # the options, resolved
    target: TargetSpec | None

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that a session of this build will hold, by purpose; the target's own memory is not in it."""
        return _memory(self.config, self.limits, self.options.dtype)


def build_engine(
    checkpoint_dir: Path | str,
    output_dir: Path | str,
    options: BuildOptions | None = None,
    *,
    target: TargetSpec | None = None,
    progress: Progress = lambda step: None,
) -> Engine:
    """Build an engine directory from a drafter checkpoint; ``plan_build`` and ``run_build`` in one."""
    return run_build(plan_build(checkpoint_dir, output_dir, options, target=target), progress)


def plan_build(
    checkpoint_dir: Path | str,
    output_dir: Path | str,
    options: BuildOptions | None = None,
    *,
    target: TargetSpec | None = None,
) -> BuildPlan:
    """Refuse what cannot be built, before anything is written.

    ``target`` has the drafter checked against the model it is meant for, and is noted in the manifest.

    Raises:
        CheckpointError: the checkpoint is unsound.
        UnsupportedError: it needs what this version does not build.
        BuildError: the options do not fit it, or nothing may be written to ``output_dir``.
        EngineMismatchError: it was not made for ``target``.
    """
    options = options or BuildOptions()
    output_dir = absolute(Path(output_dir))
    check_output(output_dir)
    if output_dir.is_relative_to(absolute(Path(checkpoint_dir))):
        raise BuildError(f"{output_dir}: lies in the checkpoint's own directory; choose another --output_dir")
    checkpoint = parse_checkpoint(checkpoint_dir)
    _check_vocabulary(checkpoint)
    rendering = render.RENDERINGS.get(options.runtime)
    if rendering is None:
        raise BuildError(f"runtime is {options.runtime!r}, expected one of {', '.join(render.RENDERINGS)}")
    if options.dtype not in rendering.compute_types:
        raise BuildError(
            f"dtype is {options.dtype!r}, but runtime {options.runtime} computes in"
            f" {', '.join(rendering.compute_types)}; choose one of these, or another --runtime"
        )
    config = overridden(checkpoint.config, options)
    limits = Limits.of(options, config)
    if target is not None:
        check_target(config, target)
    return BuildPlan(checkpoint, config, output_dir, options, limits, target)


def run_build(plan: BuildPlan, progress: Progress = lambda step: None) -> Engine:
    """Carry a plan out. ``progress`` is called with each of ``STEPS`` as it begins.

    Raises:
        CheckpointError: a weight is not finite.
        BuildError: the output cannot be written.
    """
    config, options = plan.config, plan.options
    rendering = render.RENDERINGS[options.runtime]
    with new_directory(plan.output_dir) as directory:
        progress(STEPS[0])
        tensors = load_weights(plan.checkpoint)
        sidecars = {name: tensors.pop(name) for name in sidecar_names(config)}
        sidecar_files = write_sidecars(sidecars, directory)
        weights = write_weights(tensors, directory)
        progress(STEPS[1])
        models = render.render(rendering, config, options.dtype, weights)
        model_files = render.write(models, directory)
        progress(STEPS[2])
        write_manifest(
            directory,
            config,
            options,
            rendering=rendering.name,
            package_version=__version__,
            drafter_sha256=plan.checkpoint.files.sha256(),
            target=None if plan.target is None else dataclasses.asdict(plan.target),
            files=[*model_files, directory / WEIGHTS_NAME, *sidecar_files],
        )
    return open_engine(plan.output_dir)


def _memory(config: DrafterConfig, limits: Limits, dtype: str) -> dict[str, int]:
    element, stored = (4 if name == "float32" else 2 for name in (dtype, config.dtype))
    elements = {name: math.prod(shape) for name, shape in layout(config).items()}
    in_tables = sum(elements.pop(name) for name in table_names(config))
    beside_models = {
        f"tables of the head in {config.dtype}": stored * in_tables,
        f"the drafter's own embed_tokens in {config.dtype}": stored * elements.pop("embed_tokens", 0),
        f"the drafter's own lm_head in {dtype}": element * elements.pop("lm_head", 0),
        "map of the draft vocabulary": 8 * elements.pop("d2t", 0),
    }
    return {
        f"weights in {dtype}": element * sum(elements.values()),
        **{what: size for what, size in beside_models.items() if size},
        f"context pool, {limits.num_pages} pages of {limits.tokens_per_block} tokens": limits.pool_bytes(
            config, element
        ),
        "context of 1,000 tokens": 1000 * limits.context_bytes_per_token(config, element),
        "logits of one full batch": 4 * limits.max_batch_size * limits.max_draft_len * config.draft_vocab_size,
    }


def _check_vocabulary(checkpoint: Checkpoint) -> None:
    config, where = checkpoint.config, checkpoint.files.directory
    if config.draft_vocab_size < NUM_CANDIDATES:
        raise UnsupportedError(
            f"{where}: vocab_size is {config.draft_vocab_size}, expected at least {NUM_CANDIDATES} candidates a row"
        )
