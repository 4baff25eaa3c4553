"""The table of draft heads, the values it is written in, and v1's drafting rule."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from trtllm_dflash.checkpoint.names import TENSORS, evaluate
from trtllm_dflash.config import Family
from trtllm_dflash.heads import values as v
from trtllm_dflash.heads.base import HEADS, DraftHead


def test_every_family_has_a_row_under_its_own_name() -> None:
    assert set(HEADS) == set(get_args(Family))
    assert all(head.family == family for family, head in HEADS.items())


def test_no_two_families_share_an_architecture() -> None:
    names = [name for head in HEADS.values() for name in head.architectures]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("head", HEADS.values(), ids=lambda h: h.family)
def test_letters_of_every_tensor_are_known(head: DraftHead) -> None:
    backbone = ["H", "I", "L", "nq", "nkv", "D", "K", "Ht", "V", "Vd"]
    letters = dict.fromkeys([*backbone, *head.letters], 8)
    for row in TENSORS + head.tensors:
        for part in row.parts:
            assert all(evaluate(dim, letters) > 0 for dim in part.dims.split()), row.name


@pytest.mark.parametrize(
    ("convert", "good", "value"),
    [
        (v.integer(1), 5, 5), (v.number(0.0), 2, 2.0), (v.number(0.0, exclusive=False), 0, 0.0),
        (v.boolean, False, False), (v.rank(8), 256, 256), (v.rank(0), 0, 0), (v.only(16), 16, 16),
        (v.integers(), [3, 1], (3, 1)), (v.integers(first=1), [3, 1], (2, 0)), (v.text("a", "b"), "b", "b"),
        (v.words(["a"]), ["a", "a"], ("a", "a")),
    ],
)  # fmt: skip
def test_values_convert(convert: v.Convert, good: Any, value: Any) -> None:
    assert convert(good) == value


@pytest.mark.parametrize(
    ("convert", "bad"),
    [
        (v.integer(1), 0), (v.integer(1), True), (v.integer(1), 1.0), (v.integer(1), "1"), (v.integer(1), 2**31),
        (v.integer(1), 10**400), (v.number(0.0), 0), (v.number(0.0), True), (v.number(0.0), 1e31),
        (v.number(0.0), 10**400), (v.number(0.0), "1"), (v.boolean, 0), (v.boolean, "true"), (v.integers(), []),
        (v.integers(), [True]), (v.integers(), "12"), (v.integers(), [1] * 65), (v.integers(), [10**30]),
        (v.words(["a"]), "a"), (v.words(["a"]), [1]), (v.text("vanilla"), 1),
    ],
)  # fmt: skip
def test_values_say_what_was_expected(convert: v.Convert, bad: Any) -> None:
    with pytest.raises(ValueError, match=r"^[a-z].{2,}") as caught:
        convert(bad)
    assert not isinstance(caught.value, v.NotImplementedValue)


@pytest.mark.parametrize(
    ("convert", "value", "expected"),
    [
        (v.rank(8), 12, "multiple of 8"), (v.rank(8), 264, "256"), (v.only(2), 3, "2"),
        (v.text("silu"), "gelu", "silu"),
        (v.words(["full_attention"]), ["linear_attention"], "full_attention"),
    ],
)  # fmt: skip
def test_sound_values_that_are_not_implemented_are_told_apart(convert: v.Convert, value: Any, expected: str) -> None:
    with pytest.raises(v.NotImplementedValue, match=expected):
        convert(value)
