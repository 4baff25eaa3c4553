"""Rows of the bug catalogue (spec section 9) that a configuration or a checkpoint can decide, one test each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.tiny import Tiny
from trtllm_dflash.checkpoint.parse import Parsed, parse_headers
from trtllm_dflash.checkpoint.weights import layout
from trtllm_dflash.errors import CheckpointError, UnsupportedError


def parse(tiny: Tiny, changes: dict[str, Any] | None = None, nested: dict[str, Any] | None = None) -> Parsed:
    config = tiny.config() | (changes or {})
    config["dflash_config"] |= nested or {}
    return parse_headers(config, tiny.headers())


@pytest.mark.parametrize(
    ("sliding", "is_causal", "causal"),
    [((0, 1), None, True), ((0, 1), False, False), ((), None, False), ((), True, True)],
)
def test_T22_T23_causality_is_resolved_per_layer_and_is_causal_wins(
    sliding: tuple[int, ...], is_causal: bool | None, causal: bool
) -> None:
    config = parse(Tiny(sliding_layers=sliding, window=16, is_causal=is_causal)).config
    assert [mask.causal for mask in config.layer_masks] == [causal, causal]
    assert [mask.window for mask in config.layer_masks] == [16 if sliding else None] * 2


def test_T24_window_and_causality_are_read_at_top_level_and_in_dflash_config() -> None:
    top = parse(Tiny(sliding_layers=(0, 1), window=16, is_causal=False))
    nested = parse(Tiny(sliding_layers=(0, 1)), nested={"swa_window_size": 16, "causal": False})
    assert top.config.layer_masks == nested.config.layer_masks


def test_T25_null_scaling_means_no_yarn() -> None:
    assert parse(Tiny(), {"rope_scaling": None}).config.rope.yarn is None
    yarn = parse(Tiny(yarn={"factor": 64.0, "original_max_position_embeddings": 4096})).config.rope.yarn
    assert yarn is not None
    assert (yarn.factor, yarn.original_max_position_embeddings) == (64.0, 4096)


def test_T26_theta_is_read_from_rope_parameters() -> None:
    tiny = Tiny()
    config = tiny.config()
    config.pop("rope_theta")
    config.pop("rope_scaling")
    config["rope_parameters"] = {"rope_theta": 1e7, "rope_type": "default"}
    rope = parse_headers(config, tiny.headers()).config.rope
    assert (rope.theta, rope.yarn) == (1e7, None)


@pytest.mark.parametrize("place", ["top", "rope_parameters", "rope_scaling"])
def test_T29_leaked_partial_rotary_factor_is_refused(place: str) -> None:
    leaked = {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    with pytest.raises(UnsupportedError, match=r"partial rotary.*partial_rotary_factor 0\.25"):
        parse(Tiny(), leaked if place == "top" else {place: leaked})


def test_T29_harmless_target_keys_are_stripped() -> None:
    leaked = {"partial_rotary_factor": 1.0, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    assert parse(Tiny(), {"rope_scaling": leaked}).config == parse(Tiny()).config


@pytest.mark.parametrize(("family", "row"), [("dflash", 1), ("dflash2", 1), ("dspark", 0)])
def test_T34_row_0_is_the_anchor_and_yields_a_draft_in_dspark_only(family: str, row: int) -> None:
    assert parse(Tiny(family)).config.first_draft_row == row


@pytest.mark.parametrize("family", ["dflash", "dflash2"])
@pytest.mark.parametrize("field", ["sample_from_anchor", "shift_label"])
def test_T36_rows_are_a_fact_of_the_family(family: str, field: str) -> None:
    with pytest.raises(CheckpointError, match=r"sample_from_anchor|shift_label"):
        parse(Tiny(family), nested={field: True})
    assert parse(Tiny(family), nested={field: False}).config.first_draft_row == 1


@pytest.mark.parametrize("tiny", [Tiny("dflash2"), Tiny("dspark")], ids=lambda t: t.family)
def test_T39_head_tensors_without_a_use_are_refused(tiny: Tiny) -> None:
    plain = Tiny()
    with pytest.raises(CheckpointError, match=r"contradictory|no use"):
        parse_headers(plain.config(), tiny.headers())


def test_T40_own_reduced_head_is_kept() -> None:
    config = parse(Tiny(own_lm_head=True, draft_vocab_size=100)).config
    assert config.owns_lm_head
    assert layout(config)["lm_head"] == (100, 64)
    assert (config.draft_vocab_size, config.vocab_size) == (100, 160)


def test_T41_confidence_with_markov_needs_a_rank() -> None:
    tiny = Tiny("dspark", markov_rank=0, confidence_with_markov=True)
    with pytest.raises(CheckpointError, match="confidence_head_with_markov is true but markov_rank is 0"):
        parse(tiny)


@pytest.mark.parametrize("architecture", ["DSparkDraftModel", "Qwen3DSparkModel", "DSparkSpeculator"])
def test_T42_every_dspark_name_is_one_family(architecture: str) -> None:
    assert parse(Tiny("dspark"), {"architectures": [architecture]}).config.family == "dspark"


def test_T42_bundle_is_told_apart_from_a_plain_dspark_drafter() -> None:
    tiny = Tiny("dspark")
    headers = tiny.headers() | {"mtp.0.attn.wq_a.weight": ("F32", (8, 8))}
    with pytest.raises(UnsupportedError, match=r"DeepSeek-V4 bundle.*mtp\.0"):
        parse_headers(tiny.config(), headers)


def test_T43_drafter_of_another_target_names_both_sizes() -> None:
    with pytest.raises(CheckpointError, match=r"hidden size is 96, but hidden_size is 64"):
        parse(Tiny(target_hidden_size=96))
    own = parse(Tiny(target_hidden_size=96, own_embedding=True, own_lm_head=True)).config
    assert (own.target_hidden_size, own.feature_size, own.hidden_size) == (96, 288, 64)


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark"])
def test_T44_mask_token_is_never_guessed(family: str) -> None:
    tiny = Tiny(family)
    config = tiny.config() | {"pad_token_id": 0, "eos_token_id": 1}
    del config["dflash_config"]["mask_token_id"]
    with pytest.raises(CheckpointError, match="mask_token_id is missing"):
        parse_headers(config, tiny.headers())
    with pytest.raises(CheckpointError, match="mask_token_id is 160, but vocab_size is 160"):
        parse(Tiny(family, mask_token_id=160))


@pytest.mark.parametrize(("family", "trained"), [("dflash", 7), ("dflash2", 7), ("dspark", 7)])
def test_T47_more_drafts_than_trained_are_refused(family: str, trained: int) -> None:
    assert parse(Tiny(family), {"num_speculative_tokens": trained}).config.max_draft_len == trained
    with pytest.raises(CheckpointError, match=rf"num_speculative_tokens is {trained + 1}.*trained for {trained}"):
        parse(Tiny(family), {"num_speculative_tokens": trained + 1})


def test_T49_quantized_drafter_is_refused_whatever_the_configuration_says() -> None:
    tiny = Tiny(dtype=torch.bfloat16)
    headers = tiny.headers()
    headers["layers.0.self_attn.q_proj.weight"] = ("U8", (64, 32))
    headers["layers.0.self_attn.q_proj.weight_scale"] = ("F8_E4M3", (64, 4))
    headers["layers.0.self_attn.q_proj.weight_scale_2"] = ("F32", ())
    with pytest.raises(UnsupportedError, match=r"NVFP4 \(ModelOpt\).*weight_scale_2"):
        parse_headers(tiny.config(), headers)


def test_T68_reduced_vocabulary_without_a_map_is_refused_while_parsing() -> None:
    tiny = Tiny(own_lm_head=True, draft_vocab_size=100)
    headers = {name: header for name, header in tiny.headers().items() if name not in ("d2t", "t2d")}
    with pytest.raises(CheckpointError, match="missing: d2t"):
        parse_headers(tiny.config(), headers)


def test_T73_geometry_is_the_drafters_own() -> None:
    """27B drafters have 32 heads of 128 at hidden size 5120."""
    config = parse(Tiny(num_heads=6, num_kv_heads=2, head_dim=32)).config
    assert (config.q_size, config.head_dim) == (192, 32)
