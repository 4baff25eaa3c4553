"""DFlash v1: every draft is chosen in its own row, by the logits alone."""

from __future__ import annotations

from .drafting import DraftInputs, Drafts, Sampling, choose, tie_ranks
from .rows import DraftHead, anchor_counted


def draft(inputs: DraftInputs, sampling: Sampling | None = None) -> Drafts:
    """``d_j = argmax`` over the candidates of row j; sampled: one of them by ``softmax(values / T)``.

    Source: z-lab/dflash model.py, dflash_generate; there a sampled draft comes from the whole vocabulary. Restricted to
    the candidates it is another q, which is exact all the same.
    """
    scores, ids = inputs.values.float(), inputs.ids.long()
    slots, q = choose(scores, tie_ranks(ids, scores), sampling)
    return Drafts(ids.gather(-1, slots[..., None])[..., 0], scores, q=q)


TOP1 = DraftHead(
    family="dflash",
    architectures=("DFlashDraftModel", "DFlashSpeculator"),
    default_block_size=16,
    block=anchor_counted,
    draft=draft,
    witness={"speculators_model_type": lambda value: value == "dflash"},
)
