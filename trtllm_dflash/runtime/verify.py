"""Which drafts the target confirms."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def accept_greedy(drafts: Sequence[int], logits: Tensor) -> tuple[int, int]:
    """Accepted drafts and the bonus token of one greedy verify.

    Draft j is accepted while it is the argmax of row j - 1; the bonus is the argmax of the row after the last accepted
    draft. Equal logits go to the lowest id, which ``torch.argmax`` documents (the first of several maxima).

    Shapes:
        drafts   m token ids, m >= 0
        logits   [m+1, V]  any float dtype; row 0 is the anchor's

    Raises:
        ValueError: not one row more than drafts.
    """
    if len(logits) != len(drafts) + 1:
        raise ValueError(f"{len(logits)} rows of logits for {len(drafts)} drafts and their anchor")
    choices: list[int] = logits.argmax(dim=-1).tolist()
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
        accepted += 1
    return accepted, choices[accepted]
