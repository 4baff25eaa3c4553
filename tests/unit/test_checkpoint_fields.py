"""FIELDS, row by row: every spelling is read, spellings that differ are refused, defaults are the documented ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tiny import Tiny
from trtllm_dflash.checkpoint.fields import FIELDS, TRAINING_ONLY, default_layer_ids, read_fields
from trtllm_dflash.checkpoint.findings import Findings
from trtllm_dflash.checkpoint.parse import Parsed, parse_headers
from trtllm_dflash.checkpoint.rope import rope_scaling
from trtllm_dflash.config import LayerMask, YarnScaling
from trtllm_dflash.errors import CheckpointError, UnsupportedError
from trtllm_dflash.heads.base import HEADS
from trtllm_dflash.heads.rows import REQUIRED, Field
from trtllm_dflash.heads.values import NotImplementedValue, Values

ALL_FIELDS = {field.name: field for field in FIELDS} | {f.name: f for head in HEADS.values() for f in head.fields}

_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}

# Two raw values that mean different things, for every field; None where only one value is implemented.
SAMPLES: dict[str, tuple[Any, Any]] = {
    "hidden_act": ("silu", None), "yarn": (_YARN, {**_YARN, "factor": 4.0}),
    "layer_types": (["full_attention"], ["sliding_attention"]), "target_layer_ids": ([1, 5], [5, 1]),
    "conv_kernel_size": (2, None), "selector_top_k": (16, None), "markov_kind": ("gated", "rnn"),
    "projector_type": ("dspark", "domino"),
}  # fmt: skip
FOREIGN = {  # spelling -> raw values that mean the same as the two samples
    "aux_hidden_state_layer_ids": ([2, 6], [6, 2]),
    "proposal_methods": ([{"speculative_tokens": 8}], [{"speculative_tokens": 16}]),
}


def samples(field: Field, path: str) -> tuple[Any, Any]:
    """Two raw values for a spelling of a field."""
    for ending, values in FOREIGN.items():
        if path.endswith(ending):
            return values
    if field.name in SAMPLES:
        return SAMPLES[field.name]
    try:
        field.convert(True)
    except ValueError:
        return 8, 16
    return True, False


def nested(*pairs: tuple[str, Any]) -> dict[str, Any]:
    """A configuration with values at paths."""
    config: dict[str, Any] = {}
    for path, value in pairs:
        *sections, key = path.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return config


def read(field: Field, config: dict[str, Any], **known: Any) -> Any:
    """What a field resolves to."""
    findings, values = Findings("config.json"), Values(known)
    read_fields(config, [field], values, findings)
    findings.raise_all()
    return values[field.name]


SPELLED = [(name, path) for name, field in ALL_FIELDS.items() for path in field.paths]


@pytest.mark.parametrize(("name", "path"), SPELLED)
def test_every_spelling_is_read(name: str, path: str) -> None:
    field = ALL_FIELDS[name]
    recommended = field.spellings[0]
    expected = field.convert(samples(field, recommended)[0])
    assert read(field, nested((path, samples(field, path)[0]))) == expected


@pytest.mark.parametrize(("name", "path"), [(n, p) for n, p in SPELLED if p != ALL_FIELDS[n].spellings[0]])
def test_spellings_agree_or_are_refused_with_both_values(name: str, path: str) -> None:
    field = ALL_FIELDS[name]
    first = field.spellings[0]
    (one, _), (same, other) = samples(field, first), samples(field, path)
    assert read(field, nested((first, one), (path, same))) == field.convert(one)
    if other is None:
        return
    with pytest.raises(CheckpointError) as caught:
        read(field, nested((first, one), (path, other)))
    message = str(caught.value)
    assert f"{first} is {field.convert(one)}" in message
    assert f"{path} is {field.paths[path](other)}" in message


@pytest.mark.parametrize("name", [name for name, field in ALL_FIELDS.items() if field.default is REQUIRED])
def test_required_fields_have_no_default(name: str) -> None:
    field = ALL_FIELDS[name]
    for config in ({}, nested((field.spellings[0], None))):
        with pytest.raises(CheckpointError, match=f"{field.spellings[0]} is missing"):
            read(field, config)


def test_what_is_required() -> None:
    required = {name for name, field in ALL_FIELDS.items() if field.default is REQUIRED}
    assert required == {
        "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "rope_theta", "vocab_size",
        "mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    }  # fmt: skip


def parse(tiny: Tiny, *pairs: tuple[str, Any], drop: tuple[str, ...] = ()) -> Parsed:
    """Parse a tiny checkpoint with values set and fields dropped."""
    config = tiny.config()
    for path in drop:
        section, _, key = path.rpartition(".")
        (config[section] if section else config).pop(key)
    for path, value in pairs:
        *sections, key = path.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return parse_headers(config, tiny.headers())


@pytest.mark.parametrize(
    ("family", "dropped", "attribute", "expected"),
    [
        ("dflash", "head_dim", "head_dim", 16),
        ("dflash", "rms_norm_eps", "rms_norm_eps", 1e-6),
        ("dflash", "block_size", "block_size", 16),
        ("dflash2", "block_size", "block_size", 16),
        ("dspark", "block_size", "block_size", 7),
        ("dflash", "layer_types", "layer_masks", (LayerMask(None, causal=False),) * 2),
        ("dflash", "num_target_layers", "num_target_layers", None),
        ("dflash", "hidden_act", "input_embedding_scale", 1.0),
        ("dflash", "tie_word_embeddings", "output_multiplier", 1.0),
        ("dflash", "rope_scaling", "final_logit_softcapping", None),
    ],
)
def test_defaults(family: str, dropped: str, attribute: str, expected: Any) -> None:
    assert getattr(parse(Tiny(family), drop=(dropped,)).config, attribute) == expected


def test_assumed_values_are_noted() -> None:
    notes = parse(Tiny(), drop=("block_size",)).notes
    assert any("block_size is not given; 16 is assumed" in note for note in notes)


@pytest.mark.parametrize(
    ("target", "layers", "ids"),
    [(36, 5, (1, 9, 17, 25, 33)), (40, 1, (20,)), (62, 5, (1, 16, 30, 44, 59)), (30, 5, (1, 8, 14, 20, 27))],
)
def test_default_taps_round_half_to_even(target: int, layers: int, ids: tuple[int, ...]) -> None:
    assert default_layer_ids(Values(num_target_layers=target, num_layers=layers)) == ids


def test_default_taps_need_the_targets_depth() -> None:
    with pytest.raises(CheckpointError, match=r"target_layer_ids is missing, expected .*num_target_layers"):
        parse(Tiny(num_target_layers=None), drop=("dflash_config.target_layer_ids",))


def test_default_taps_are_one_for_each_drafter_layer() -> None:
    tiny = Tiny(num_layers=3, target_layer_ids=(1, 2, 3), num_target_layers=6)
    assert parse(tiny, drop=("dflash_config.target_layer_ids",)).config.target_layer_ids == (1, 2, 3)


def test_tap_order_is_kept() -> None:
    assert parse(Tiny(target_layer_ids=(4, 0, 2))).config.target_layer_ids == (4, 0, 2)


def test_speculators_layout_is_read() -> None:
    """Geometry in transformer_layer_config, EAGLE-style taps, proposals in a list."""
    tiny = Tiny(sliding_layers=(0, 1), window=16, own_embedding=True, own_lm_head=True, draft_vocab_size=100)
    flat = tiny.config()
    top = {key: flat.pop(key) for key in ("architectures", "block_size", "draft_vocab_size")}
    flat.pop("dflash_config")
    flat.pop("num_target_layers")
    config = {
        **top, "speculators_model_type": "dflash", "transformer_layer_config": flat, "mask_token_id": 3,
        "aux_hidden_state_layer_ids": [2, 3, 5], "sliding_window_non_causal": True,
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}]},
    }  # fmt: skip
    parsed = parse_headers(config, tiny.headers()).config
    assert parsed.target_layer_ids == (1, 2, 4)
    assert parsed.layer_masks == (LayerMask(16, causal=False),) * 2
    assert (parsed.draft_vocab_size, parsed.mask_token_id, parsed.max_draft_len) == (100, 3, 7)


@pytest.mark.parametrize(
    ("options", "extra", "expected"),
    [
        ({}, {}, [(None, False), (None, False)]),
        ({"sliding_layers": (0,), "window": 16}, {}, [(16, True), (None, False)]),
        ({"sliding_layers": (0,), "window": 16, "is_causal": False}, {}, [(16, False), (None, False)]),
        ({"sliding_layers": (0,), "window": 16, "is_causal": True}, {}, [(16, True), (None, True)]),
        ({"sliding_layers": (0,), "window": 16}, {"dflash_config.causal": False}, [(16, False), (None, False)]),
        ({"sliding_layers": (0,), "window": 16}, {"sliding_window_non_causal": True}, [(16, False), (None, False)]),
        ({"sliding_layers": (0,), "window": 16}, {"sliding_window_non_causal": False}, [(16, True), (None, False)]),
        ({}, {"dflash_config.use_swa": True, "dflash_config.swa_window_size": 32}, [(32, False), (32, False)]),
        ({"window": 24}, {"dflash_config.use_swa": True}, [(24, False), (24, False)]),
        ({"window": 24}, {"dflash_config.use_swa": True, "dflash_config.causal": False}, [(24, False), (24, False)]),
        ({"window": 16}, {}, [(None, False), (None, False)]),
    ],
)
def test_masks_follow_types_window_and_causality(
    options: dict[str, Any], extra: dict[str, Any], expected: list[tuple[int | None, bool]]
) -> None:
    masks = parse(Tiny(**options), *extra.items()).config.layer_masks
    assert [(mask.window, mask.causal) for mask in masks] == expected


@pytest.mark.parametrize(
    ("first", "slides"), [(None, [True, True]), (0, [True, True]), (1, [False, True]), (2, [False, False])]
)
def test_huggingface_legacy_pair_decides_without_layer_types(first: int | None, slides: list[bool]) -> None:
    extra = [("use_sliding_window", True), ("max_window_layers", first)]
    masks = parse(Tiny(window=16), *extra, drop=("layer_types",)).config.layer_masks
    assert [mask.window is not None for mask in masks] == slides


def test_layer_types_win_over_max_window_layers() -> None:
    masks = parse(Tiny(window=16, sliding_layers=(0,)), ("max_window_layers", 2), ("use_sliding_window", True))
    assert [mask.window for mask in masks.config.layer_masks] == [16, None]


PLAIN = YarnScaling(8.0, 32)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"rope_type": "default"}, None),
        ({}, None),
        ({"rope_type": "default", "rope_theta": 1e7, "mrope_section": [1], "mrope_interleaved": True}, None),
        ({"rope_type": "default", "partial_rotary_factor": 1.0}, None),
        (_YARN, PLAIN),
        ({"type": "yarn", "factor": 8, "original_max_position_embeddings": 32}, PLAIN),
        ({**_YARN, "type": "yarn", "truncate": True, "mscale": 1.0}, PLAIN),
        ({**_YARN, "beta_fast": 16, "beta_slow": 2}, YarnScaling(8.0, 32, 16.0, 2.0)),
        ({**_YARN, "attention_factor": 1.5}, YarnScaling(8.0, 32, attention_factor=1.5)),
        ({**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, YarnScaling(8.0, 32, attention_factor=1.0)),
    ],
)
def test_rope_scaling_reads_both_spellings(value: dict[str, Any], expected: YarnScaling | None) -> None:
    assert rope_scaling(value) == expected


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("yarn", "object"), ({"rope_type": 1}, "rope_type"), ({"rope_type": "yarn", "type": "default"}, "agree"),
        ({"rope_type": "yarn", "factor": 8.0}, "original_max_position_embeddings"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 32}, "factor"), ({**_YARN, "factor": 0}, "factor"),
        ({**_YARN, "beta_fast": "x"}, "beta_fast"),
    ],
)  # fmt: skip
def test_wrong_rope_scaling_is_refused_naming_the_key(value: Any, names: str) -> None:
    with pytest.raises(ValueError, match=names) as caught:
        rope_scaling(value)
    assert not isinstance(caught.value, NotImplementedValue)


@pytest.mark.parametrize(
    "value",
    [
        {"rope_type": "linear", "factor": 2.0}, {"rope_type": "llama3"}, {**_YARN, "truncate": False},
        {**_YARN, "mscale": 0.7}, {**_YARN, "short_factor": [1]}, {"full_attention": {"rope_theta": 1e6}},
    ],
)  # fmt: skip
def test_rope_that_is_not_implemented_is_told_apart(value: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedValue):
        rope_scaling(value)


@pytest.mark.parametrize("key", sorted(TRAINING_ONLY - {"confidence_head_alpha"}))
def test_training_only_keys_change_nothing(key: str) -> None:
    assert parse(Tiny(), (f"dflash_config.{key}", 1)) == parse(Tiny())


def test_unknown_keys_are_refused_in_sections_and_ignored_at_top_level() -> None:
    assert parse(Tiny(), ("pad_token_id", 0), ("surprise", 1)) == parse(Tiny())
    with pytest.raises(UnsupportedError, match=r"dflash_config\.surprise, dspark_config\.more"):
        parse(Tiny(), ("dflash_config.surprise", 1), ("dspark_config.more", 2))


@pytest.mark.parametrize(
    ("options", "extra", "drop", "kind", "with_markov"),
    [
        ({}, (), ("markov_head_type",), "vanilla", True),
        ({"markov_head_type": "gated"}, (), (), "gated", True),
        ({"markov_head_type": "rnn", "confidence_with_markov": False}, (), (), "rnn", False),
        ({}, (), ("confidence_head_with_markov",), "vanilla", True),
        ({"confidence_with_markov": False}, (), ("confidence_head_with_markov",), "vanilla", False),
        ({}, (), ("enable_confidence_head",), "vanilla", True),
        ({"confidence": False}, (), ("enable_confidence_head",), "vanilla", None),
        ({}, (("dflash_config.confidence_head_alpha", 0.5),), ("enable_confidence_head",), "vanilla", True),
        ({"confidence": False}, (("dflash_config.confidence_head_alpha", 0.0),), ("enable_confidence_head",),
         "vanilla", None),
    ],
)  # fmt: skip
def test_dspark_heads(
    options: dict[str, Any], extra: Any, drop: tuple[str, ...], kind: str, with_markov: bool | None
) -> None:
    tiny = Tiny("dspark", **options)
    config = parse(tiny, *extra, drop=tuple(f"dflash_config.{key}" for key in drop)).config
    assert config.markov is not None
    assert config.markov.kind == kind
    assert (None if config.confidence is None else config.confidence.with_markov) == with_markov


@pytest.mark.parametrize(
    ("extra", "drafts", "first_row"),
    [
        ({}, 7, 0),
        ({"sample_from_anchor": True}, 7, 0),
        ({"dflash_config.shift_label": True, "num_speculative_tokens": 5}, 7, 0),
        ({"sample_from_anchor": False, "num_speculative_tokens": 7}, 7, 1),
        ({"dspark_config.sample_from_anchor": False, "num_speculative_tokens": 6}, 6, 1),
    ],
)
def test_dspark_rows(extra: dict[str, Any], drafts: int, first_row: int) -> None:
    config = parse(Tiny("dspark"), *extra.items()).config
    assert (config.max_draft_len, config.first_draft_row) == (drafts, first_row)
