"""Whether a drafter belongs to a target: one list of comparisons, used by builds, by ``check`` and by the proposer."""

from __future__ import annotations

from .config import DrafterConfig, TargetSpec
from .errors import EngineMismatchError, Problems


def check_target(drafter: DrafterConfig, target: TargetSpec) -> None:
    """Raise EngineMismatchError naming everything in which the target differs from the one the drafter was made for."""
    remedy = "use the target that the drafter was trained for, or a drafter of this target"
    problems = Problems(f"drafter and target {target.name}", remedy)
    for what, found, expected in (
        ("hidden_size", target.hidden_size, drafter.target_hidden_size),
        ("lm_head rows (vocab_size)", target.vocab_size, drafter.vocab_size),
        ("num_hidden_layers", target.num_layers, drafter.num_target_layers),
    ):
        if expected is not None and found != expected:
            problems.add(f"the target's {what} is {found}, the drafter was made for {expected}")
    if outside := [layer for layer in drafter.target_layer_ids if layer >= target.num_layers]:
        problems.add(f"target_layer_ids {outside} lie outside the target's {target.num_layers} layers")
    reads_mask_row = not (drafter.owns_embedding or drafter.has_mask_embedding)
    if reads_mask_row and drafter.mask_token_id >= target.embedding_rows:
        problems.add(
            f"mask_token_id is {drafter.mask_token_id}, but the target's embedding has {target.embedding_rows} rows"
        )
    problems.raise_as(EngineMismatchError)
