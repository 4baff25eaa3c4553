"""``SessionProposer`` on a session that only writes down what it was given."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.fakes import LIMITS, MASK, VOCAB, FakeSession, tiny_config
from tests.support.heads import markov_config, tables
from trtllm_dflash.config import LayerMask, TargetSpec
from trtllm_dflash.errors import EngineMismatchError, UnsupportedError
from trtllm_dflash.heads.base import HEADS
from trtllm_dflash.runtime.block_drafts import Decline
from trtllm_dflash.runtime.session_proposer import SequenceState, SessionProposer

WIDE = 3 * 64
TARGET = TargetSpec("tiny", hidden_size=64, num_layers=6, vocab_size=VOCAB, embedding_rows=VOCAB)


def make(session: FakeSession | None = None, **options: object) -> SessionProposer:
    return SessionProposer(session or FakeSession(), HEADS["dflash"], **options)


def rows(first: int, num_rows: int) -> Tensor:
    """Features whose first element is 1000 + their position."""
    return (1000.0 + torch.arange(first, first + num_rows))[:, None].expand(-1, WIDE).clone()


def prompt(proposer: SessionProposer, num_tokens: int = 10) -> SequenceState:
    state = proposer.alloc_state()
    assert proposer.prefill_drafter(list(range(num_tokens)), rows(0, num_tokens), state) == num_tokens
    return state


def context(proposer: SessionProposer, state: SequenceState) -> list[tuple[int, float]]:
    return proposer.session.held(proposer._cache.tables([state.context]))


def true_context(*positions: int) -> list[tuple[int, float]]:
    return [(position, 1000.0 + position) for position in positions]


def test_prefill_is_ingested_in_chunks_of_max_num_tokens() -> None:
    proposer = make()
    state = prompt(proposer, 40)
    assert proposer.session.ingested == [16, 16, 8]
    assert context(proposer, state) == true_context(*range(40))
    assert (proposer.drafter_rows(state), proposer.last_pair_key(state)) == (40, 39)


def test_T33_row_0_yields_no_draft() -> None:
    proposer = make()
    drafts = proposer.propose(5, 10, 7, prompt(proposer))
    assert drafts == [FakeSession.token_at(10 + row) for row in range(1, 8)]


def test_T34_row_0_is_the_anchor_and_the_others_are_masks() -> None:
    proposer = make()
    proposer.propose(77, 10, 4, prompt(proposer))
    assert proposer.session.embeddings[0, :, 0].tolist() == [77, MASK, MASK, MASK, MASK]


@pytest.mark.parametrize("num_drafts", [0, 1, 6, 7])
def test_narrower_than_built_is_fine(num_drafts: int) -> None:
    proposer = make()
    assert len(proposer.propose(5, 10, num_drafts, prompt(proposer))) == num_drafts
    assert not proposer.declines


@pytest.mark.parametrize("num_drafts", [-1, 8, 100])
def test_wider_than_built_is_refused(num_drafts: int) -> None:
    proposer = make()
    state = prompt(proposer)
    with pytest.raises(ValueError, match=f"{num_drafts} drafts asked for, the engine was built for 0..7"):
        proposer.propose(5, 10, num_drafts, state)
    assert proposer.propose(5, 10, 7, state), "and the refusal left the state as it was"


@pytest.mark.parametrize("eager", [True, False])
def test_T08_T09_exactly_the_accepted_rows_enter_at_their_true_positions(eager: bool) -> None:
    proposer = make()
    state, position, stack = prompt(proposer), 10, None
    rng = random.Random(0)
    for _ in range(12):
        drafts = proposer.propose(5, position, 7, state, target_hidden_stack=stack)
        assert len(drafts) == 7, "the newest row is the one before the anchor"
        assert context(proposer, state) == true_context(*range(position))
        accepted = rng.randrange(8) if position < 70 else 0
        stack = rows(position, accepted + 1)
        proposer.after_verify(accepted, state, target_hidden_stack=stack if eager else None)
        stack = None if eager else stack
        position += accepted + 1
    assert not proposer.declines


@pytest.mark.parametrize("num_rows", [2, 4, 8])
def test_T08_T09_any_other_number_of_rows_is_refused(num_rows: int) -> None:
    """Three rows are known after two accepted drafts: one short would lag for good, more would be rejected drafts."""
    proposer = make()
    state = prompt(proposer)
    proposer.propose(5, 10, 7, state)
    with pytest.raises(ValueError, match=f"{num_rows} feature rows for 2 accepted drafts"):
        proposer.after_verify(2, state, target_hidden_stack=rows(10, num_rows))
    proposer.after_verify(2, state)
    with pytest.raises(ValueError, match="3 tokens were accepted" if num_rows < 3 else "rows come once"):
        proposer.propose(5, 13, 7, state, target_hidden_stack=rows(13 - num_rows, num_rows))
    assert context(proposer, state) == true_context(*range(10))
    assert proposer.propose(5, 13, 7, state, target_hidden_stack=rows(10, 3))


def test_a_step_without_drafts_leaves_no_hole() -> None:
    proposer = make()
    state = prompt(proposer)
    assert proposer.propose(5, 10, 0, state) == []
    proposer.after_verify(0, state, target_hidden_stack=rows(10, 1))
    assert proposer.propose(5, 11, 7, state)
    assert context(proposer, state) == true_context(*range(11))


def test_positions_may_jump() -> None:
    """An image span: the rows in between do not exist, the new ones keep their true positions in a new page."""
    proposer = make()
    state = prompt(proposer)
    assert proposer.propose(5, 33, 7, state, target_hidden_stack=rows(30, 3))
    assert context(proposer, state) == true_context(*range(10), 30, 31, 32)
    tables = proposer.session.context
    assert tables.page_position.tolist() == [[0, 8, 30]]
    assert tables.page_rows.tolist() == [[8, 2, 3]]


@pytest.mark.parametrize("position", [9, 11, 40])
def test_a_context_that_does_not_end_before_the_anchor_gives_no_drafts(position: int) -> None:
    proposer = make()
    assert proposer.propose(5, position, 7, prompt(proposer)) == []
    assert proposer.declines == {Decline.BEHIND: 1}


def test_no_context_gives_no_drafts() -> None:
    proposer = make()
    assert proposer.propose(5, 0, 7, proposer.alloc_state()) == []
    assert proposer.declines == {Decline.NO_CONTEXT: 1}


def sliding(window: int) -> SessionProposer:
    return make(FakeSession(tiny_config(layer_masks=(LayerMask(window, True), LayerMask(window - 3, True)))))


def test_an_all_sliding_drafter_takes_what_it_can_see() -> None:
    """A query at N or later sees back to N - (W - 1); whole pages before that are given back."""
    proposer = sliding(window=12)
    assert proposer.prefill_hidden_rows(96) == 11
    assert proposer.prefill_hidden_rows(5) == 5
    state = proposer.alloc_state()
    assert proposer.prefill_drafter(range(30), rows(0, 30), state) == 11
    assert context(proposer, state) == true_context(*range(19, 30))
    for position in range(30, 90):
        assert proposer.propose(5, position, 1, state)
        proposer.after_verify(0, state, target_hidden_stack=rows(position, 1))
        held = [p for p, _ in context(proposer, state)]
        assert held == list(range(held[0], position + 1)), "no hole"
        assert held[0] <= position + 1 - 11, "nothing visible was dropped"
        assert len(held) < 11 + LIMITS.tokens_per_block
    assert proposer.drafter_rows(state) == len(held)


def test_chunked_prefill_of_a_sliding_drafter() -> None:
    proposer = sliding(window=12)
    state = proposer.alloc_state()
    for start in range(0, 60, 20):
        proposer.prefill_drafter(range(20), rows(start, 20), state, start_position=start)
    assert context(proposer, state) == true_context(*range(49, 60))
    assert proposer.propose(5, 60, 7, state)


def test_a_layer_without_window_keeps_everything() -> None:
    proposer = make(FakeSession(tiny_config(layer_masks=(LayerMask(12, True), LayerMask(None, False)))))
    assert proposer.prefill_hidden_rows(96) == 96
    assert len(context(proposer, prompt(proposer, 50))) == 50


def test_a_sequence_past_max_seq_len_gets_no_drafts_and_gives_its_pages_back() -> None:
    proposer = make()
    state = prompt(proposer, 95)
    for position, stack in ((95, 1), (96, 3)):
        proposer.propose(5, position, 7, state)
        proposer.after_verify(stack - 1, state, target_hidden_stack=rows(position, stack))
    assert proposer.propose(5, 99, 7, state) == []
    proposer.after_verify(0, state, target_hidden_stack=rows(99, 1))
    assert proposer.propose(5, 100, 7, state) == []
    assert proposer.declines == {Decline.EXHAUSTED: 2}
    assert (proposer.drafter_rows(state), proposer.last_pair_key(state)) == (0, None)
    assert proposer._cache.num_free_pages == LIMITS.num_pages - 1


def test_T10_an_exhausted_pool_hurts_only_the_sequence_that_came_too_late() -> None:
    proposer = make()
    first, second = prompt(proposer, 90), prompt(proposer, 90)
    late = proposer.alloc_state()
    assert proposer.prefill_drafter(range(20), rows(0, 20), late) == 0
    assert proposer.propose(5, 20, 7, late) == []
    assert proposer.propose(5, 90, 7, first)
    assert proposer.propose(5, 90, 7, second)
    assert proposer.declines == {Decline.EXHAUSTED: 1}


def test_T10_a_new_sequence_on_old_pages_sees_nothing_of_the_old_one() -> None:
    proposer = make()
    old = prompt(proposer, 50)
    proposer.free_state(old)
    fresh = proposer.alloc_state()
    proposer.prefill_drafter(range(5), rows(500, 5) - 500, fresh)
    assert context(proposer, fresh) == true_context(0, 1, 2, 3, 4)
    assert proposer.propose(5, 5, 7, fresh) == [FakeSession.token_at(5 + row) for row in range(1, 8)]


def test_T11_ten_thousand_requests_leak_nothing() -> None:
    """Any order of begin, steps, abandonment at any point, and freeing once or twice; two sequences interleave."""
    proposer, rng = make(), random.Random(7)
    live: list[tuple[SequenceState, int]] = []
    for _ in range(10_000):
        if len(live) == 2:
            gone, _ = live.pop(rng.randrange(2))
            for _ in range(rng.choice((1, 2))):
                proposer.free_state(gone)
        length = rng.choice((1, 7, 8, 9, 30, 94, 96, 97))
        state = proposer.alloc_state_for(length) if length <= 96 else proposer.alloc_state()
        proposer.prefill_drafter(range(length), rows(0, length), state)
        for _ in range(rng.choice((0, 0, 1, 2))):
            proposer.propose(5, length, 1, state)
            if rng.random() < 0.8:
                proposer.after_verify(0, state, target_hidden_stack=rows(length, 1))
                length += 1
            else:
                break
        live.append((state, length))
    owned = sum(state.context.num_pages for state, _ in live)
    assert proposer._cache.num_free_pages == LIMITS.num_pages - 1 - owned
    for state, _ in live:
        proposer.free_state(state)
    assert sorted(proposer._cache._free) == list(range(1, LIMITS.num_pages))


def spoiled(spoil: Callable[[Tensor, Tensor], None]) -> tuple[list[int], SessionProposer]:
    proposer = make()
    proposer.session.spoil = spoil
    return proposer.propose(5, 10, 7, prompt(proposer)), proposer


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_give_no_drafts(value: float) -> None:
    drafts, proposer = spoiled(lambda ids, values: values[6, 15].fill_(value))
    assert drafts == []
    assert proposer.declines == {Decline.NOT_FINITE: 1}


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_ids_outside_the_vocabulary_give_no_drafts(token: int) -> None:
    drafts, proposer = spoiled(lambda ids, values: ids[3, 9].fill_(token))
    assert drafts == []
    assert proposer.declines == {Decline.OUT_OF_RANGE: 1}


@pytest.mark.parametrize("row", range(7))
def test_drafts_end_before_the_mask_token(row: int) -> None:
    drafts, proposer = spoiled(lambda ids, values: ids[row, 0].fill_(MASK))
    assert drafts == [FakeSession.token_at(11 + j) for j in range(row)]
    assert proposer.declines == {Decline.FORBIDDEN: 1}


def test_a_reduced_vocabulary_is_mapped_to_target_ids() -> None:
    to_target = torch.arange(100, 140)
    to_target[5] = MASK
    session = FakeSession(tiny_config(draft_vocab_size=40), tables={"d2t": to_target})
    session.spoil = lambda ids, values: ids.copy_(torch.arange(7, dtype=torch.int32)[:, None].expand(-1, 16))
    proposer = make(session)
    assert proposer.propose(5, 10, 7, prompt(proposer)) == [100, 101, 102, 103, 104]
    for wrong, found in (({}, "missing"), ({"d2t": torch.arange(39)}, r"\[39\]")):
        with pytest.raises(EngineMismatchError, match=rf"d2t is {found}, expected \[40\]"):
            FakeSession(tiny_config(draft_vocab_size=40), tables=wrong)


def test_verdicts_and_proposals_alternate() -> None:
    proposer = make()
    state = prompt(proposer)
    with pytest.raises(RuntimeError, match="without a propose"):
        proposer.after_verify(0, state)
    proposer.propose(5, 10, 7, state)
    with pytest.raises(RuntimeError, match="propose twice"):
        proposer.propose(5, 10, 7, state)
    for accepted in (-1, 8):
        with pytest.raises(ValueError, match=f"{accepted} drafts accepted, 7 were proposed"):
            proposer.after_verify(accepted, state)
    proposer.after_verify(0, state)
    with pytest.raises(RuntimeError, match="without a propose"):
        proposer.after_verify(0, state)


def test_a_freed_state_is_not_used_again() -> None:
    proposer = make()
    state = prompt(proposer)
    proposer.free_state(state)
    for call in (
        lambda: proposer.propose(5, 10, 7, state),
        lambda: proposer.prefill_drafter([1], rows(10, 1), state),
        lambda: proposer.after_verify(0, state),
    ):
        with pytest.raises(RuntimeError, match="has been freed"):
            call()
    with pytest.raises(TypeError, match="state of type object"):
        proposer.propose(5, 10, 7, object())


@pytest.mark.parametrize("option", ["grammar_bitmask", "grammar", "draft_embed_target", "sampling"])
def test_options_without_effect_are_refused(option: str) -> None:
    proposer = make()
    with pytest.raises(UnsupportedError, match=option):
        proposer.propose(5, 10, 7, prompt(proposer), **{option: torch.ones(1)})


def test_features_of_another_size_are_refused_with_both_sizes() -> None:
    proposer = make()
    with pytest.raises(ValueError, match=r"features \[4, 128\], expected \[n, 192\]"):
        proposer.prefill_drafter(range(4), torch.zeros(4, 128), proposer.alloc_state())


def test_catching_up_needs_the_right_base() -> None:
    proposer = make()
    state = prompt(proposer)
    assert proposer.catchup_drafter(range(3), rows(10, 3), 9, 10, state) == 0
    assert proposer.catchup_drafter(range(3), rows(9, 3), 10, 9, state) == 0
    assert proposer.catchup_drafter(range(3), rows(10, 3), 10, 10, state) == 3
    assert proposer.propose(5, 13, 7, state)


def test_a_request_longer_than_the_engine_is_refused_before_it_starts() -> None:
    proposer = make()
    assert proposer.alloc_state_for(96)
    with pytest.raises(EngineMismatchError, match=r"97 tokens.*max_seq_len 96.*--max_seq_len 97"):
        proposer.alloc_state_for(97)


def test_T43_every_difference_to_the_target_is_named() -> None:
    proposer = make(FakeSession(tiny_config(target_layer_ids=(1, 2, 5))))
    proposer.validate_against_target(TARGET)
    other = TargetSpec("other", hidden_size=80, num_layers=4, vocab_size=170, embedding_rows=2)
    with pytest.raises(EngineMismatchError) as refusal:
        proposer.validate_against_target(other)
    for numbers in (("80", "64"), ("4", "6"), ("170", "160"), ("[5]",), ("3", "2 rows")):
        assert any(all(n in line for n in numbers) for line in str(refusal.value).splitlines()[1:]), numbers
    same_but_layers = dataclasses.replace(TARGET, num_layers=7)
    make(FakeSession(tiny_config(num_target_layers=None))).validate_against_target(same_but_layers)


def test_block_rows_and_taps_come_from_the_drafter() -> None:
    proposer = make()
    assert (proposer.block_gamma(), proposer.max_num_drafts(), tuple(proposer.tapped_layers())) == (8, 7, (1, 2, 4))
    narrow = FakeSession(limits=dataclasses.replace(LIMITS, max_draft_len=3))
    assert (make(narrow).block_gamma(), make(narrow).max_num_drafts()) == (4, 3)


def dspark_session(kind: str = "vanilla", *, with_markov: bool | None = True) -> FakeSession:
    config = markov_config(kind, with_markov=with_markov)
    return FakeSession(config, tables=tables(config))


def dspark(session: FakeSession | None = None, **options: object) -> SessionProposer:
    return SessionProposer(session or dspark_session(), **options)


@pytest.mark.parametrize("first_row", [0, 1], ids=["sample_from_anchor", "sample_from_anchor false"])
def test_T36_in_shifted_drafters_row_0_yields_draft_1(first_row: int) -> None:
    """Candidates, and the hidden states beside them, begin at the row that the drafter says; the block has no other."""
    config = dataclasses.replace(markov_config(with_markov=None), first_draft_row=first_row)
    session = FakeSession(config, tables=tables(config))
    session.tables["markov_w2"].zero_()
    proposer = dspark(session)
    drafts = proposer.propose(77, 10, 7, prompt(proposer))
    assert drafts == [FakeSession.token_at(10 + row) for row in range(first_row, first_row + 7)]
    assert session.embeddings[0, :, 0].tolist() == [77, *[MASK] * (6 + first_row)]
    context = proposer._cache.tables([SequenceState(proposer).context])
    candidates = session.draft(torch.tensor([77]), torch.tensor([10], dtype=torch.int32), context, 7)
    assert candidates.hidden[0, :, 0].tolist() == list(range(10 + first_row, 17 + first_row))


def test_the_last_confidence_is_the_smallest_of_the_drafts_returned() -> None:
    session = dspark_session()
    proposer = dspark(session)
    assert proposer.last_confidence() is None
    whole = []
    for width in range(1, 8):
        assert len(proposer.propose(77, 10, width, prompt(proposer))) == width
        whole.append(proposer.last_confidence())
    assert whole == sorted(whole, reverse=True)
    assert whole[-1] < whole[0] < 1.0
    session.spoil = lambda ids, values: values.fill_(torch.nan)
    assert proposer.propose(77, 10, 7, prompt(proposer)) == []
    assert proposer.last_confidence() is None, "the confidence of an earlier step must not stay"


def test_drafts_end_before_the_first_unsure_one() -> None:
    session = dspark_session()
    reference = dspark(session)
    everything = reference.propose(77, 10, 7, prompt(reference))
    given = [
        reference.propose(77, 10, width, prompt(reference)) and reference.last_confidence() for width in range(1, 8)
    ]
    tau = given[-1] + 1e-4  # just above the smallest
    kept = next(index for index, smallest in enumerate(given) if smallest < tau)
    proposer = dspark(session, draft_conf_tau=tau)
    assert proposer.propose(77, 10, 7, prompt(proposer)) == everything[:kept]
    assert proposer.declines == {Decline.UNSURE: 1}
    assert proposer.last_confidence() == (given[kept - 1] if kept else None)
    nothing = dspark(session, draft_conf_tau=1.0)
    assert nothing.propose(77, 10, 7, prompt(nothing)) == []
    assert nothing.last_confidence() is None
    for off in (0.0, -1.0):
        proposer = dspark(session, draft_conf_tau=off)
        assert proposer.propose(77, 10, 7, prompt(proposer)) == everything
        assert not proposer.declines


def test_a_verdict_counts_the_drafts_that_were_kept() -> None:
    proposer = dspark(draft_conf_tau=1.0)
    state = prompt(proposer)
    assert proposer.propose(77, 10, 7, state) == []
    with pytest.raises(ValueError, match="1 drafts accepted, 0 were proposed"):
        proposer.after_verify(1, state)


def test_temperatures_change_the_confidence_of_their_own_draft() -> None:
    plain, warm = dspark(), dspark(confidence_temperatures=[1e6] + [1.0] * 6)
    for proposer in (plain, warm):
        proposer.propose(77, 10, 1, prompt(proposer))
    assert warm.last_confidence() == pytest.approx(0.5, abs=1e-5)
    assert abs(plain.last_confidence() - 0.5) > 1e-3


@pytest.mark.parametrize("options", [{"draft_conf_tau": 0.5}, {"confidence_temperatures": [1.0] * 7}], ids=str)
def test_confidence_options_without_a_confidence_head_are_refused(options: dict[str, object]) -> None:
    for session in (FakeSession(), dspark_session(with_markov=None)):
        with pytest.raises(UnsupportedError, match="has no confidence head"):
            SessionProposer(session, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_conf_tau": 1.5}, "draft_conf_tau is 1.5"),
        ({"draft_conf_tau": float("nan")}, "draft_conf_tau is nan"),
        ({"confidence_temperatures": [1.0] * 6}, "expected 7 positive numbers"),
        ({"confidence_temperatures": [1.0] * 6 + [0.0]}, "expected 7 positive numbers"),
        ({"confidence_temperatures": [1.0] * 6 + [float("inf")]}, "expected 7 positive numbers"),
    ],
    ids=str,
)
def test_confidence_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dspark(**options)


@pytest.mark.parametrize("name", ["markov_w2", "confidence"])
def test_scores_and_confidences_that_are_not_finite_cost_drafts_only(name: str) -> None:
    session = dspark_session()
    session.tables[name].fill_(torch.nan)
    proposer = dspark(session)
    assert proposer.propose(77, 10, 7, prompt(proposer)) == []
    assert proposer.declines == {Decline.NOT_FINITE: 1}
    assert proposer.last_confidence() is None


def test_a_state_of_another_proposer_is_refused() -> None:
    """Its pages are numbers of another pool; freed here, two sequences would share them."""
    ours, theirs = make(), make()
    state = theirs.alloc_state()
    for call in (ours.free_state, ours.drafter_rows, ours.last_pair_key):
        with pytest.raises(TypeError, match="not of this proposer's alloc_state"):
            call(state)


def test_positions_begin_at_zero() -> None:
    proposer = make()
    with pytest.raises(ValueError, match="positions begin at 0"):
        proposer.prefill_drafter([1, 2], torch.zeros(2, proposer.session.config.feature_size), proposer.alloc_state(),
                                 start_position=-1)  # fmt: skip


@pytest.mark.parametrize("token", [-1, 160, 10**6])
def test_an_anchor_that_is_no_token_costs_drafts_only(token: int) -> None:
    proposer = make()
    state = proposer.alloc_state()
    proposer.prefill_drafter([1], torch.zeros(1, proposer.session.config.feature_size), state)
    assert proposer.propose(token, 1, 7, state) == []
    assert proposer.declines == {Decline.UNKNOWN_ANCHOR: 1}
