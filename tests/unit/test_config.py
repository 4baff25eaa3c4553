"""DrafterConfig and BuildOptions: derived sizes, and the round trip through an engine's config.json."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.support.tiny import Tiny
from trtllm_dflash.checkpoint.parse import parse_headers
from trtllm_dflash.config import BuildOptions, DrafterConfig, LayerMask, RopeConfig, YarnScaling

EVERY_FAMILY = [
    Tiny(),
    Tiny(sliding_layers=(0,), window=16, yarn={"factor": 8.0, "original_max_position_embeddings": 32}),
    Tiny(own_embedding=True, own_lm_head=True, target_hidden_size=48, draft_vocab_size=100, mask_embedding=True),
    Tiny("dflash2", sliding_layers=(0, 1), window=16, is_causal=False),
    Tiny("dspark", markov_head_type="rnn", confidence_with_markov=False, final_logit_softcapping=30.0),
    Tiny("dspark", markov_rank=0, confidence=False),
]


def parsed(tiny: Tiny) -> DrafterConfig:
    return parse_headers(tiny.config(), tiny.headers()).config


@pytest.mark.parametrize("tiny", EVERY_FAMILY, ids=lambda t: f"{t.family}-{EVERY_FAMILY.index(t)}")
def test_config_survives_json(tiny: Tiny) -> None:
    config = parsed(tiny)
    assert DrafterConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_from_json_refuses_unknown_fields_by_name() -> None:
    values = parsed(Tiny()).to_json() | {"colour": "blue"}
    with pytest.raises(TypeError, match="colour"):
        DrafterConfig.from_json(values)


def test_derived_sizes() -> None:
    config = parsed(Tiny())
    assert (config.num_taps, config.feature_size) == (3, 192)
    assert (config.q_size, config.kv_size, config.qkv_size) == (64, 32, 128)


@pytest.mark.parametrize(
    ("family", "drafts", "rows"), [("dflash", 7, 8), ("dflash2", 7, 8), ("dspark", 7, 7)]
)  # fmt: skip
def test_block_rows_count_the_anchor_in_v1_and_not_in_dspark(family: str, drafts: int, rows: int) -> None:
    config = parsed(Tiny(family))
    assert (config.max_draft_len, config.max_block_rows) == (drafts, rows)
    assert config.block_rows(3) == 3 + config.first_draft_row


@pytest.mark.parametrize(("windows", "expected"), [((None, None), None), ((16, None), None), ((16, 32), 31)])
def test_context_window_is_what_the_widest_layer_still_sees(
    windows: tuple[int | None, ...], expected: int | None
) -> None:
    masks = tuple(LayerMask(window, causal=True) for window in windows)
    assert dataclasses.replace(parsed(Tiny()), layer_masks=masks).context_window == expected


@pytest.mark.parametrize(
    ("factor", "original", "f_20", "f_63", "magnitude"),
    [(64.0, 4096, 2.6584061e-3, 2.0099952e-9, 1.415888), (32.0, 8192, 3.9774625e-3, 4.0199905e-9, 1.346574)],
)
def test_yarn_reproduces_the_worked_values(
    factor: float, original: int, f_20: float, f_63: float, magnitude: float
) -> None:
    rope = RopeConfig(theta=1e7, yarn=YarnScaling(factor, original))
    frequencies = rope.inverse_frequencies(128)
    assert frequencies[0] == 1.0
    assert frequencies[20] == pytest.approx(f_20, rel=1e-7)
    assert frequencies[63] == pytest.approx(f_63, rel=1e-7)
    assert rope.magnitude == pytest.approx(magnitude, rel=1e-6)


def test_every_build_option_explains_itself_and_has_a_default() -> None:
    options = BuildOptions()
    for option in dataclasses.fields(BuildOptions):
        assert len(option.metadata["help"]) > 10, option.name
        assert hasattr(options, option.name)
