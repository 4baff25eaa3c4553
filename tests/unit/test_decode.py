"""The decoding loop on a real, tiny target: speculative output is plain output, whatever the drafter says.

The target runs in float64: there, rows computed together and one by one choose the same tokens, so equality is exact.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.support.fakes import LIMITS, VOCAB, FakeProposer, FakeSession, tiny_config, tiny_target
from trtllm_dflash.errors import DFlashError, EngineMismatchError
from trtllm_dflash.heads.base import HEADS
from trtllm_dflash.runtime.decode import Generation, generate
from trtllm_dflash.runtime.hf_target import HFTarget
from trtllm_dflash.runtime.session_proposer import SessionProposer

NEW_TOKENS = 21
Guess = Callable[[int, int], list[int]]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(dtype=torch.float64, num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(target: HFTarget) -> list[tuple[list[int], list[int]]]:
    """60 random prompts and their plain continuations."""
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(60)]
    return [(prompt, generate(target, None, prompt, max_new_tokens=NEW_TOKENS).token_ids) for prompt in prompts]


def perfect(prompt: list[int], output: list[int]) -> Guess:
    """The target's own continuation; the anchor at position p is output[p - len(prompt)]."""
    return lambda position, m: output[position - len(prompt) + 1 :][:m]


def wrong(prompt: list[int], output: list[int]) -> Guess:
    return lambda position, m: [(token + 1) % VOCAB for token in perfect(prompt, output)(position, m)]


def at_random(prompt: list[int], output: list[int]) -> Guess:
    rng = random.Random(len(prompt))
    return lambda position, m: [rng.randrange(VOCAB) for _ in range(m)]


def mixed(prompt: list[int], output: list[int]) -> Guess:
    """Right up to a random place, of a random length, perhaps empty."""
    rng = random.Random(sum(prompt))

    def guess(position: int, m: int) -> list[int]:
        drafts = perfect(prompt, output)(position, rng.randint(0, m))
        return [t if rng.random() < 0.7 else (t + 1) % VOCAB for t in drafts]

    return guess


PROPOSALS = {
    "perfect": perfect,
    "all wrong": wrong,
    "random": at_random,
    "too few": lambda prompt, output: lambda position, m: perfect(prompt, output)(position, min(m, 2)),
    "none": lambda prompt, output: lambda position, m: [],
    "mixed": mixed,
}


def check_counts(result: Generation) -> None:
    statistics = result.statistics
    assert statistics.new_tokens == len(result.token_ids) == 1 + sum(statistics.acceptance_lengths)
    steps = zip(statistics.acceptance_lengths, statistics.drafted, statistics.accepted, strict=True)
    assert all(1 <= produced <= accepted + 1 <= drafted + 1 for produced, drafted, accepted in steps)


def check_context(target: HFTarget, prompt: list[int], result: Generation, proposer: FakeProposer) -> None:
    """The drafter was given the features of exactly the tokens before the anchor, as a clean forward computes them."""
    (state,) = proposer.states
    assert state.freed
    if state.features:
        found = torch.cat(state.features)
        tokens = [*prompt, *result.token_ids][: len(found)]
        expected = target.new_sequence(proposer.taps).forward(tokens).features
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("proposal", PROPOSALS)
def test_output_does_not_depend_on_the_drafter(proposal: str, target: HFTarget, plain) -> None:
    for prompt, expected in plain:
        proposer = FakeProposer(PROPOSALS[proposal](prompt, expected))
        result = generate(target, proposer, prompt, max_new_tokens=14)
        assert result.token_ids == expected[:14], f"prompt {prompt}"
        assert result.finish_reason == "length"
        check_counts(result)
    check_context(target, prompt, result, proposer)


def test_perfect_drafts_make_full_steps_and_wrong_ones_single_tokens(target: HFTarget, plain) -> None:
    prompt, expected = plain[0]
    full = generate(target, FakeProposer(perfect(prompt, expected)), prompt, max_new_tokens=NEW_TOKENS).statistics
    assert full.acceptance_lengths == [8, 8, 4]
    none = generate(target, FakeProposer(wrong(prompt, expected)), prompt, max_new_tokens=NEW_TOKENS).statistics
    assert none.acceptance_lengths == [1] * (NEW_TOKENS - 1)
    assert none.acceptance_length == 1.0
    narrow = FakeProposer(perfect(prompt, expected))
    steps = generate(target, narrow, prompt, max_new_tokens=NEW_TOKENS, num_drafts=2).statistics
    assert steps.acceptance_lengths == [3] * 6 + [2]
    assert steps.drafted == [2] * 7


@pytest.mark.parametrize("max_new_tokens", range(1, 21))
@pytest.mark.parametrize("proposal", ["perfect", "mixed"])
def test_every_length_limit_is_exact(proposal: str, max_new_tokens: int, target: HFTarget, plain) -> None:
    prompt, expected = plain[3]
    proposer = FakeProposer(PROPOSALS[proposal](prompt, expected))
    result = generate(target, proposer, prompt, max_new_tokens=max_new_tokens)
    assert result.token_ids == expected[:max_new_tokens]
    assert result.finish_reason == "length"
    room = max_new_tokens - 1
    for produced, drafted in zip(result.statistics.acceptance_lengths, result.statistics.drafted, strict=True):
        assert drafted <= min(7, room), "no draft that cannot be emitted"
        room -= produced
    check_counts(result)
    check_context(target, prompt, result, proposer)


@pytest.mark.parametrize("offset", range(20))
@pytest.mark.parametrize("proposal", ["perfect", "all wrong", "mixed", "none"])
def test_a_stop_token_ends_the_sequence_at_every_offset_of_a_block(
    proposal: str, offset: int, target: HFTarget, plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later rows are neither emitted nor kept, in the drafter or in the target; the stop token is the new anchor."""
    sequences, new_sequence = [], target.new_sequence

    def keep(taps: Sequence[int]) -> object:
        sequences.append(new_sequence(taps))
        return sequences[-1]

    monkeypatch.setattr(target, "new_sequence", keep)
    prompt, expected = next((p, e) for p, e in plain if e.index(e[offset]) == offset)  # its first occurrence
    proposer = FakeProposer(PROPOSALS[proposal](prompt, expected))
    heard: list[int] = []
    stop = expected[offset]

    def hear(token: int, drafted: bool) -> None:
        heard.append(token)

    result = generate(target, proposer, prompt, max_new_tokens=NEW_TOKENS, stop_ids={stop}, on_token=hear)
    assert result.token_ids == heard == expected[: offset + 1]
    assert result.finish_reason == "stop"
    check_counts(result)
    assert sequences[0].length == len(prompt) + offset
    (state,) = proposer.states
    assert state.num_rows == (len(prompt) + offset if offset else 0), "a finished prompt is not even ingested"
    check_context(target, prompt, result, proposer)


def test_on_token_tells_drafted_tokens_from_bonus_tokens(target: HFTarget, plain) -> None:
    prompt, expected = plain[0]
    heard: list[tuple[int, bool]] = []
    proposer = FakeProposer(perfect(prompt, expected), width=3)
    generate(target, proposer, prompt, max_new_tokens=9, on_token=lambda *event: heard.append(event))
    drafted = [False, True, True, True, False, True, True, True, False]
    assert heard == list(zip(expected[:9], drafted, strict=True))


def test_plain_decoding_asks_for_no_taps_and_one_row_a_step(target: HFTarget, monkeypatch) -> None:
    taps, rows = [], []
    new_sequence = target.new_sequence

    def spy(tapped=()):
        taps.append(tuple(tapped))
        sequence = new_sequence(tapped)
        forward = sequence.forward
        sequence.forward = lambda ids, **options: (rows.append(len(ids)), forward(ids, **options))[1]
        return sequence

    monkeypatch.setattr(target, "new_sequence", spy)
    result = generate(target, None, [5, 6, 7], max_new_tokens=5)
    assert (taps, rows) == ([()], [3, 1, 1, 1, 1])
    assert result.statistics.drafted == [0] * 4
    assert result.statistics.declines == {}


def test_plain_output_is_the_argmax_of_the_whole_sequence(target: HFTarget, plain) -> None:
    for prompt, output in plain[:10]:
        logits = target.new_sequence().forward([*prompt, *output[:-1]]).logits
        assert logits[len(prompt) - 1 :].argmax(dim=-1).tolist() == output


@pytest.mark.parametrize("limit", [0, -3])
def test_requests_that_make_no_sense_are_refused(limit: int, target: HFTarget) -> None:
    with pytest.raises(DFlashError, match="prompt: 0 tokens"):
        generate(target, None, [], max_new_tokens=5)
    with pytest.raises(DFlashError, match=f"max_new_tokens: {limit}"):
        generate(target, None, [1], max_new_tokens=limit)
    with pytest.raises(DFlashError, match="num_drafts: 8, the drafter was built for at most 7"):
        generate(target, FakeProposer(lambda position, m: []), [1], max_new_tokens=5, num_drafts=8)


def session_proposer() -> SessionProposer:
    return SessionProposer(FakeSession(tiny_config(target_layer_ids=(0, 1, 0), num_target_layers=2)), HEADS["dflash"])


def test_a_request_that_does_not_fit_is_refused_before_anything_runs(target: HFTarget, monkeypatch) -> None:
    monkeypatch.setattr(target, "new_sequence", lambda taps: pytest.fail("the target ran"))
    with pytest.raises(EngineMismatchError, match="sequence of 97 tokens"):
        generate(target, session_proposer(), list(range(80)), max_new_tokens=17)


def test_a_failing_request_frees_its_pages(target: HFTarget) -> None:
    proposer = session_proposer()

    def hang_up(token: int, drafted: bool) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        generate(target, proposer, [1, 2, 3], max_new_tokens=5, on_token=hang_up)
    assert proposer._cache.num_free_pages == LIMITS.num_pages - 1


def test_declines_of_this_prompt_are_in_its_statistics(target: HFTarget, plain) -> None:
    proposer = session_proposer()
    proposer.session.spoil = lambda ids, values: values.fill_(float("nan"))
    prompt, expected = plain[5]
    for _ in range(2):
        result = generate(target, proposer, prompt, max_new_tokens=NEW_TOKENS)
        assert result.token_ids == expected
        assert result.statistics.declines == {"candidate values are not finite": NEW_TOKENS - 1}


def test_seconds_add_up_to_the_wall_time(target: HFTarget, plain) -> None:
    prompt, expected = plain[0]
    seconds = generate(target, FakeProposer(perfect(prompt, expected)), prompt, max_new_tokens=20).statistics.seconds
    assert all(value > 0 for value in seconds.values())
    assert seconds["prefill"] + seconds["verify"] > seconds["own"], "the target does the work"
