"""Counts, shares and alarms."""

from __future__ import annotations

import json

import pytest

from trtllm_dflash.runtime.statistics import ALARM_STEPS, PHASES, DecodeStatistics


def steps(*triples: tuple[int, int, int]) -> DecodeStatistics:
    """Statistics of these (produced, drafted, accepted) steps."""
    statistics = DecodeStatistics(prompts=1)
    for triple in triples:
        statistics.add_step(*triple)
    return statistics


def test_acceptance_length_counts_the_bonus() -> None:
    assert steps((3, 7, 2), (1, 7, 0), (8, 7, 7)).acceptance_length == 4.0
    assert steps().acceptance_length is None


def test_position_acceptance_ignores_steps_that_drafted_less() -> None:
    """The last blocks of an output are narrow; counting them would bend the curve at its far end."""
    statistics = steps((3, 3, 2), (1, 3, 0), (2, 1, 1), (1, 0, 0))
    assert statistics.position_acceptance == [2 / 3, 1 / 2, 0.0]


def test_a_cut_at_a_stop_token_rejects_nothing() -> None:
    statistics = steps((1, 3, 3))
    assert statistics.position_acceptance == [1.0, 1.0, 1.0]
    assert statistics.acceptance_length == 1.0


def test_T62_alarm_when_nothing_is_ever_accepted() -> None:
    assert steps(*[(1, 7, 0)] * (ALARM_STEPS - 1)).alarms() == []
    (alarm,) = steps(*[(1, 7, 0)] * ALARM_STEPS).alarms()
    assert "exactly 1.00 over 64 drafting steps" in alarm
    assert steps(*[(1, 7, 0)] * ALARM_STEPS, (2, 7, 1)).alarms() == []


def test_T03_alarm_when_everything_is_always_accepted() -> None:
    (alarm,) = steps(*[(8, 7, 7)] * ALARM_STEPS).alarms()
    assert "every draft of 64 drafting steps was accepted" in alarm
    assert steps(*[(8, 7, 7)] * ALARM_STEPS, (7, 7, 6)).alarms() == []


def test_plain_decoding_raises_no_alarm() -> None:
    assert steps(*[(1, 0, 0)] * 200).alarms() == []


def test_merging_adds_up() -> None:
    first, second = steps((3, 7, 2)), steps((1, 7, 0), (2, 2, 1))
    first.new_tokens, second.new_tokens = 4, 4
    first.declines["no context row"] = 1
    second.declines["no context row"] = 2
    with first.phase("draft"):
        pass
    second.seconds["draft"] += 2.0
    total = DecodeStatistics.merged([first, second])
    assert (total.prompts, total.new_tokens, total.num_steps) == (2, 8, 3)
    assert total.acceptance_lengths == [3, 1, 2]
    assert total.declines == {"no context row": 3}
    assert total.seconds["draft"] == first.seconds["draft"] + 2.0
    assert first.acceptance_lengths == [3], "parts stay as they are"


def test_json_is_plain_and_complete() -> None:
    statistics = steps((3, 7, 2), (1, 7, 0))
    statistics.seconds.update(prefill=1.0, draft=0.5, verify=1.0, ingest=0.25, own=0.25)
    values = json.loads(json.dumps(statistics.to_json()))
    assert values["acceptance_length"] == 2.0
    assert (values["steps"], values["drafted"], values["accepted"]) == (2, 14, 2)
    assert values["tokens_per_second"] == 2.0
    assert tuple(values["seconds"]) == PHASES
    assert DecodeStatistics().to_json()["tokens_per_second"] is None


def test_an_unknown_phase_is_a_bug() -> None:
    with pytest.raises(KeyError), DecodeStatistics().phase("lunch"):
        pass
