"""The drafting rules once more, for one sequence and over the whole vocabulary: the oracle of ``heads/``.

Written from the formulas as plain loops; nothing is shared with the rules that run. Arguments are named after the
tensors of our layout, of any float dtype; everything is computed in fp32. Greedy: a tie goes to the larger logit, then
to the lower id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def selector_walk(
    candidates: Tensor, logits: Tensor, projected: Tensor, predecessor: Tensor, successor: Tensor, anchor: int
) -> tuple[list[int], Tensor]:
    """DFlash 2: ``score_t(b) = z_t[b] + sum_q A[prev][q] * r_t[q] * S[b][q]`` over the candidates, one after the other.

    Shapes:
        candidates              [m, k]  ids
        logits                  [m, k]  of the candidates
        projected               [m, r]
        predecessor, successor  [V, r]
        returns                 drafts and scores [m, k]

    Source: z-lab/dflash model.py, CandidateSelector.select.
    """
    scores = torch.empty(candidates.shape)
    drafts, previous = [], anchor
    for t in range(len(candidates)):
        for slot, b in enumerate(candidates[t].tolist()):
            terms = predecessor[previous].float() * projected[t].float() * successor[b].float()
            scores[t, slot] = logits[t, slot].float() + terms.sum()
        previous = _best(candidates[t].tolist(), scores[t].tolist(), logits[t].tolist())
        drafts.append(previous)
    return drafts, scores


def markov_walk(
    logits: Tensor,
    hidden: Tensor,
    weights: Mapping[str, Tensor],
    anchor: int,
    kind: str,
    target_ids: Sequence[int] | None = None,
) -> tuple[list[int], Tensor]:
    """DSpark: add the Markov bias of the previous token to each row of logits, over the whole vocabulary.

    With e = W1[previous], h = the row's hidden state, and s = 0 before the block:
    vanilla ``W2 e``; gated ``W2 (sigmoid(Wg [h; e] + bg) * e)``;
    rnn ``[g, c, o] = Wj [s; e; h] + bj``, ``s = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)``, ``W2 tanh(o)``.

    Shapes:
        logits   [m, Vd] after multiplier and soft cap
        hidden   [m, H]  after the final norm
        weights  markov_w1 [V, r], markov_w2 [Vd, r]; markov_gate [r, H+r], markov_joint [3r, 2r+H] and their biases
        returns  drafts, as target ids, and corrected logits [m, Vd]

    ``target_ids`` are those of a reduced vocabulary's columns: W1 has a row for each target id, W2 for each column.

    Raises:
        ValueError: another kind.

    Source: SpecForge specforge/modeling/draft/dspark.py.
    """
    w = {name: tensor.float() for name, tensor in weights.items() if name.startswith("markov")}
    state = torch.zeros(rank := w["markov_w1"].shape[1])
    rows, drafts, previous = [], [], anchor
    for z, h in zip(logits.float(), hidden.float(), strict=True):
        e = w["markov_w1"][previous]
        if kind == "vanilla":
            x = e
        elif kind == "gated":
            x = torch.sigmoid(w["markov_gate"] @ torch.cat((h, e)) + w["markov_gate_bias"]) * e
        elif kind == "rnn":
            joint = w["markov_joint"] @ torch.cat((state, e, h)) + w["markov_joint_bias"]
            gate = torch.sigmoid(joint[:rank])
            state = gate * state + (1.0 - gate) * torch.tanh(joint[rank : 2 * rank])
            x = torch.tanh(joint[2 * rank :])
        else:
            raise ValueError(f"Markov head of kind {kind!r}, expected vanilla, gated or rnn")
        corrected = z + w["markov_w2"] @ x
        column = _best(range(len(z)), corrected.tolist(), z.tolist())
        previous = column if target_ids is None else target_ids[column]
        rows.append(corrected)
        drafts.append(previous)
    return drafts, torch.stack(rows)


def confidence(
    hidden: Tensor,
    previous: Sequence[int],
    weight: Tensor,
    bias: Tensor,
    markov_w1: Tensor | None = None,
    temperatures: Sequence[float] | None = None,
) -> list[float]:
    """``sigmoid((w . x_j + b) / T_j)`` of each draft, with ``x_j = [h_j; W1[previous_j]]``, or ``h_j`` without W1.

    Shapes: hidden ``[m, H]``, previous m tokens (the anchor, then drafts 1 to m - 1), weight ``[1, H]`` or
    ``[1, H + r]``, bias ``[1]``, markov_w1 ``[V, r]``, temperatures m numbers (default 1).
    Source: SpecForge specforge/modeling/draft/dspark.py, DSparkDraftModel.predict_confidence.
    """
    values = []
    for j, token in enumerate(previous):
        x = hidden[j].float()
        if markov_w1 is not None:
            x = torch.cat((x, markov_w1[token].float()))
        logit = torch.dot(weight[0].float(), x) + bias[0].float()
        values.append(float(torch.sigmoid(logit / (1.0 if temperatures is None else temperatures[j]))))
    return values


def _best(ids: Sequence[int], scores: Sequence[float], logits: Sequence[float]) -> int:
    """The id with the largest score; among equals the one with the larger logit, then the lowest."""
    _, _, negated = max((score, logit, -token) for token, score, logit in zip(ids, scores, logits, strict=True))
    return -negated
