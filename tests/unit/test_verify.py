"""Greedy acceptance, and the comparison of two outputs."""

from __future__ import annotations

import pytest
import torch

from tests.support.fakes import tiny_target
from trtllm_dflash.runtime.compare import first_difference
from trtllm_dflash.runtime.verify import accept_greedy


def rows(*choices: int, vocab: int = 10) -> torch.Tensor:
    """Logits whose argmax per row is given."""
    return torch.nn.functional.one_hot(torch.tensor(choices), vocab).float()


@pytest.mark.parametrize(
    ("drafts", "choices", "verdict"),
    [
        ([], [4], (0, 4)),
        ([4], [4, 7], (1, 7)),
        ([5], [4, 7], (0, 4)),
        ([1, 2, 3], [1, 2, 3, 9], (3, 9)),
        ([1, 2, 3], [1, 2, 8, 9], (2, 8)),
        ([1, 2, 3], [0, 2, 3, 9], (0, 0)),  # later matches do not count after the first mismatch
        ([1, 1, 1], [1, 2, 1, 1], (1, 2)),
    ],
)
def test_leading_matches_are_accepted_and_the_next_row_gives_the_bonus(drafts, choices, verdict) -> None:
    assert accept_greedy(drafts, rows(*choices)) == verdict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab", [3, 160, 49152, 151_936])
@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.usefixtures("two_threads")
def test_ties_go_to_the_lowest_id(dtype: torch.dtype, vocab: int, num_rows: int) -> None:
    """For every vector lane and every thread that reduces a part: the winner may stand anywhere."""
    generator = torch.Generator().manual_seed(vocab)
    for _ in range(20):
        tied = torch.randint(0, vocab, (num_rows, 5), generator=generator)
        logits = torch.full((num_rows, vocab), -1.0, dtype=dtype).scatter_(1, tied, 2.0)
        winners = tied.min(dim=1).values.tolist()
        assert accept_greedy(winners[:-1], logits) == (num_rows - 1, winners[-1])


@pytest.mark.parametrize(("drafts", "num_rows"), [([1, 2], 2), ([], 2), ([], 0)])
def test_one_row_per_draft_and_anchor(drafts: list[int], num_rows: int) -> None:
    with pytest.raises(ValueError, match=f"{num_rows} rows of logits for {len(drafts)} drafts"):
        accept_greedy(drafts, torch.zeros(num_rows, 10))


def test_T57_a_difference_reports_the_top2_margin() -> None:
    target = tiny_target(dtype=torch.float64)
    prompt = [5, 9, 11]
    logits = target.new_sequence().forward([*prompt, 20, 21], last_only=True).logits[-1]
    first, second = logits.sort(descending=True).values[:2].tolist()
    found = first_difference(target, prompt, [20, 21, 40, 41], [20, 21, 30, 31])
    assert found is not None
    assert (found.index, found.plain, found.speculative) == (2, 30, 40)
    assert found.gap == pytest.approx(first - second, rel=1e-5)
    assert found.is_tie == (first - second < 1e-3)


def test_T57_ends_count_as_differences_and_equal_outputs_do_not() -> None:
    target = tiny_target()
    assert first_difference(target, [5], [1, 2], [1, 2]) is None
    shorter = first_difference(target, [5], [1], [1, 2])
    assert shorter is not None
    assert (shorter.index, shorter.plain, shorter.speculative) == (1, 2, None)
