"""DSpark's heads against SpecForge (PyPI ``specforge==0.2.0``), the trainer that the public drafters come from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from specforge.modeling.draft.dspark import AcceptRatePredictor, DSparkDraftModel, build_markov_head
from torch import Tensor, nn

from tests.support.fakes import VOCAB
from tests.support.heads import HIDDEN, RANK, TABLES_OF_KIND, full_logits, inputs, markov_config
from trtllm_dflash.heads.base import HEADS
from trtllm_dflash.heads.drafting import DraftInputs
from trtllm_dflash.reference.heads import markov_walk

KINDS = tuple(TABLES_OF_KIND)
THEIR_NAMES = {
    "markov_w1.weight": "markov_w1", "markov_w2.weight": "markov_w2", "gate_proj.weight": "markov_gate",
    "gate_proj.bias": "markov_gate_bias", "joint_proj.weight": "markov_joint", "joint_proj.bias": "markov_joint_bias",
}  # fmt: skip


def their_head(kind: str, tables: dict[str, Tensor]) -> nn.Module:
    config = SimpleNamespace(vocab_size=VOCAB, hidden_size=HIDDEN)
    head = build_markov_head(config, {"markov_rank": RANK, "markov_head_type": kind})
    head.load_state_dict({name: tables[ours] for name, ours in THEIR_NAMES.items() if ours in tables})
    return head.eval()


@torch.inference_mode()
def their_walk(kind: str, given: DraftInputs, logits: Tensor) -> tuple[Tensor, Tensor]:
    head = their_head(kind, dict(given.tables))
    tokens, corrected = head.sample_block_tokens(logits, first_prev_token_ids=given.anchors, hidden_states=given.hidden)
    return tokens, corrected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_the_reference_walks_as_specforge_over_the_whole_vocabulary(kind: str, seed: int) -> None:
    given, logits = inputs(markov_config(kind), seed=seed), full_logits(seed=seed)
    tokens, corrected = their_walk(kind, given, logits)
    assert given.hidden is not None
    for row, anchor in enumerate(given.anchors.tolist()):
        ours, scores = markov_walk(logits[row], given.hidden[row], given.tables, anchor, kind)
        assert ours == tokens[row].tolist()
        torch.testing.assert_close(scores, corrected[row], rtol=1e-5, atol=1e-5)
    assert not torch.equal(tokens, logits.argmax(-1)), "the bias must matter"


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_walks_as_specforge_when_only_candidates_compete(kind: str) -> None:
    """All other logits at -1e30: then both walk the same 16 tokens, whatever the bias."""
    for seed in range(6):
        given, logits = inputs(markov_config(kind), seed=seed), full_logits(seed=seed)
        only = torch.full_like(logits, -1e30).scatter(-1, given.ids.long(), given.values)
        tokens, corrected = their_walk(kind, given, only)
        drafts = HEADS["dspark"].draft(given)
        assert torch.equal(drafts.tokens, tokens)
        torch.testing.assert_close(drafts.scores, corrected.gather(-1, given.ids.long()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_markov", [True, False])
@torch.inference_mode()
def test_confidence_is_the_sigmoid_of_specforges_prediction(with_markov: bool) -> None:
    given = inputs(markov_config("rnn", with_markov=with_markov))
    tables = dict(given.tables)
    predictor = AcceptRatePredictor(HIDDEN + RANK * with_markov)
    predictor.load_state_dict({"proj.weight": tables["confidence"], "proj.bias": tables["confidence_bias"]})
    model = SimpleNamespace(
        confidence_head=predictor, confidence_head_with_markov=with_markov, markov_head=their_head("rnn", tables)
    )
    drafts = HEADS["dspark"].draft(given)
    previous = torch.cat((given.anchors[:, None], drafts.tokens[:, :-1]), dim=1)
    logits = DSparkDraftModel.predict_confidence(model, given.hidden, prev_token_ids=previous)
    torch.testing.assert_close(drafts.confidence, logits.sigmoid(), rtol=1e-5, atol=1e-6)
