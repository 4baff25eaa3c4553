"""SmolLM2-135M with the drafter of ``examples/``, against the authors' loop on the same prompts, in fp32."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.e2e.conftest import NEW_TOKENS, STOP_IDS
from trtllm_dflash.runtime.compare import first_difference
from trtllm_dflash.runtime.decode import Generation, generate
from trtllm_dflash.runtime.hf_target import HFTarget
from trtllm_dflash.runtime.session import Session
from trtllm_dflash.runtime.session_proposer import SessionProposer
from trtllm_dflash.runtime.statistics import DecodeStatistics

pytestmark = pytest.mark.timeout(900)

FIRST_ROW = 100
# Mean acceptance length of each prompt, as recorded when the drafter was made (rows 100..111 of the evaluation file).
RECORDED = (2.18, 2.61, 2.74, 3.46, 2.79, 3.18, 3.50, 2.61, 2.67, 2.94, 2.79, 3.44)


@pytest.fixture(scope="session")
def generations(session: Session, target: HFTarget, prompts: list[list[int]]) -> list[Generation]:
    proposer = SessionProposer(session)
    proposer.validate_against_target(target.spec)
    return [generate(target, proposer, prompt, max_new_tokens=NEW_TOKENS, stop_ids=STOP_IDS) for prompt in prompts]


def test_tokens_are_those_of_the_authors_loop(
    generations: list[Generation], authors: list[SimpleNamespace], target: HFTarget, prompts: list[list[int]]
) -> None:
    differences = [
        (index, str(first_difference(target, prompt, ours.token_ids, theirs.new_ids)))
        for index, (prompt, ours, theirs) in enumerate(zip(prompts, generations, authors, strict=True))
        if ours.token_ids != theirs.new_ids
    ]
    assert not differences


def test_acceptance_lengths_are_those_of_the_authors_loop(
    generations: list[Generation], authors: list[SimpleNamespace]
) -> None:
    ours = [generation.statistics.acceptance_lengths for generation in generations]
    assert ours == [result.acceptance_lengths for result in authors]


def test_acceptance_is_as_recorded(generations: list[Generation], rows: slice) -> None:
    statistics = [generation.statistics for generation in generations]
    assert (
        tuple(round(s.acceptance_length, 2) for s in statistics)
        == RECORDED[rows.start - FIRST_ROW : rows.stop - FIRST_ROW]
    )
    total = DecodeStatistics.merged(statistics)
    assert total.position_acceptance[:3] == sorted(total.position_acceptance[:3], reverse=True), "no kink (T35)"
    assert total.alarms() == []
    assert total.declines == {}


def test_T57_output_is_that_of_plain_decoding_or_differs_at_a_tie(
    generations: list[Generation], plain: list[Generation], target: HFTarget, prompts: list[list[int]]
) -> None:
    for prompt, ours, theirs in zip(prompts, generations, plain, strict=True):
        difference = first_difference(target, prompt, ours.token_ids, theirs.token_ids)
        assert difference is None or difference.is_tie, difference
