"""DSpark's drafting rule: a low-rank bias from the previous draft over the candidates, and a confidence per draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import MarkovConfig
from .drafting import DraftInputs, Drafts, Sampling, required, walk

Tables = Mapping[str, Tensor]
Kind = Callable[[Tables, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Tables, previous token's embedding e ``[S, r]``, hidden row h ``[S, H]``, state s ``[S, r]``; all fp32 ->
what W2 is applied to ``[S, r]``, and the next state ``[S, r]``."""


def _vanilla(tables: Tables, e: Tensor, h: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return e, s


def _gated(tables: Tables, e: Tensor, h: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    gate = F.linear(torch.cat((h, e), dim=-1), tables["markov_gate"], tables["markov_gate_bias"])
    return gate.sigmoid() * e, s


def _rnn(tables: Tables, e: Tensor, h: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    joint = F.linear(torch.cat((s, e, h), dim=-1), tables["markov_joint"], tables["markov_joint_bias"])
    gate, candidate, output = joint.chunk(3, dim=-1)
    keep = gate.sigmoid()
    return output.tanh(), keep * s + (1 - keep) * candidate.tanh()


# Step and the small tables that it reads whole, once a block in fp32; W1 and W2 are read by rows.
KINDS: Mapping[str, tuple[Kind, tuple[str, ...]]] = {
    "vanilla": (_vanilla, ()),
    "gated": (_gated, ("markov_gate", "markov_gate_bias")),
    "rnn": (_rnn, ("markov_joint", "markov_joint_bias")),
}


class _MarkovEdge:
    """``W2[candidates] . x`` with x from the previous token; the state starts at zero in every block."""

    def __init__(self, inputs: DraftInputs, markov: MarkovConfig, hidden: Tensor) -> None:
        self._step, whole = KINDS[markov.kind]
        self._tables = {name: inputs.tables[name].float() for name in whole}
        self._w1, self._hidden = inputs.tables["markov_w1"], hidden
        self._w2 = inputs.tables["markov_w2"][inputs.columns].float()  # [S, m, 16, r]
        self._state = hidden.new_zeros(len(hidden), markov.rank)

    def __call__(self, step: int, previous: Tensor) -> Tensor:
        e, h = self._w1[previous].float(), self._hidden[:, step]
        x, self._state = self._step(self._tables, e, h, self._state)
        return torch.einsum("skr,sr->sk", self._w2[:, step], x)


def _no_edge(step: int, previous: Tensor) -> Tensor:
    return torch.zeros(1, 1, device=previous.device)


def draft(inputs: DraftInputs, sampling: Sampling | None = None) -> Drafts:
    """Walk the candidates with ``score_j = value_j + W2 x_j``, e = W1[previous], h = the row's hidden state:

    vanilla  ``x = e``; gated  ``x = sigmoid(Wg [h; e] + bg) * e``;
    rnn      ``[g, c, o] = Wj [s; e; h] + bj``, ``s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c)``, ``x = tanh(o)``.

    The bias over the whole vocabulary is in ``reference/heads.py``; over the candidates alone the greedy draft is the
    same whenever the best token of the corrected row is among them.

    Raises:
        ValueError: no hidden states.

    Source: SpecForge specforge/modeling/draft/dspark.py, VanillaMarkovHead, GatedMarkovHead, RNNMarkovHead.
    """
    config, hidden = inputs.config, required(inputs.hidden, "hidden", "dspark").float()
    edge = _no_edge if config.markov is None else _MarkovEdge(inputs, config.markov, hidden)
    drafts = walk(inputs, edge, sampling)
    if config.confidence is None:
        return drafts
    return Drafts(drafts.tokens, drafts.scores, _confidence(inputs, hidden, drafts.tokens), drafts.q)


def _confidence(inputs: DraftInputs, hidden: Tensor, tokens: Tensor) -> Tensor:
    """``sigmoid((w . x_j + b) / T_j)``, ``x_j = [h_j; W1[previous_j]]`` or ``h_j``; float32 ``[S, m]``.

    Source: DSparkDraftModel.predict_confidence, there before the sigmoid.
    """
    rows = hidden
    if required(inputs.config.confidence, "confidence", "dspark").with_markov:
        previous = torch.cat((inputs.anchors[:, None], tokens[:, :-1]), dim=1)
        rows = torch.cat((hidden, inputs.tables["markov_w1"][previous].float()), dim=-1)
    logits = F.linear(rows, inputs.tables["confidence"].float(), inputs.tables["confidence_bias"].float())[..., 0]
    if inputs.confidence_temperatures is not None:
        logits = logits / inputs.confidence_temperatures[: logits.shape[1]]
    return logits.sigmoid()
