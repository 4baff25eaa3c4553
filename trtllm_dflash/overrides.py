"""Build options that change what a checkpoint says: the drafter that is built, and recorded in the manifest."""

from __future__ import annotations

import dataclasses

from .config import BuildOptions, DrafterConfig, LayerMask
from .errors import BuildError, Problems
from .io_spec import NUM_CANDIDATES
from .limits import MAX_SIZE


def overridden(config: DrafterConfig, options: BuildOptions) -> DrafterConfig:
    """The checkpoint's drafter with the options' overrides.

    Raises:
        BuildError: an override does not fit the drafter; all of them in one message.
    """
    problems = Problems("build options", "choose other values")
    changed = dataclasses.replace(
        config,
        valid_vocab_size=_valid_vocab_size(config, options, problems),
        layer_masks=_layer_masks(config, options, problems),
    )
    problems.raise_as(BuildError)
    return changed


def _layer_masks(config: DrafterConfig, options: BuildOptions, problems: Problems) -> tuple[LayerMask, ...]:
    """Causality stays what the checkpoint says of each layer; the window alone is another."""
    window = options.window_size
    if window is None:
        return config.layer_masks
    drafts = config.max_draft_len if options.max_draft_len is None else options.max_draft_len
    rows = config.block_rows(min(max(drafts, 1), config.max_draft_len))  # other widths are refused with the limits
    problems.check(
        rows <= window <= MAX_SIZE,
        f"window_size is {window}, but a block has {rows} rows; expected {rows} to {MAX_SIZE}",
    )
    return tuple(LayerMask(window, mask.causal) for mask in config.layer_masks)


def _valid_vocab_size(config: DrafterConfig, options: BuildOptions, problems: Problems) -> int | None:
    valid, vocab = options.valid_vocab_size, config.vocab_size
    if valid is None:
        return None
    if config.draft_vocab_size != vocab:
        problems.add(
            f"valid_vocab_size is {valid}, but the drafter has a vocabulary of its own, {config.draft_vocab_size} of"
            f" {vocab} tokens listed in d2t; leave the option out"
        )
    problems.check(
        NUM_CANDIDATES <= valid <= vocab,
        f"valid_vocab_size is {valid}, expected {NUM_CANDIDATES} (candidates of a row) to vocab_size {vocab}",
    )
    return valid
