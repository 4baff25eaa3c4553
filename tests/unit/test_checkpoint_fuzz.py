"""Whatever a checkpoint contains, the only exceptions are our own, and what parses has a consistent layout."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.tiny import Tiny, write_checkpoint
from trtllm_dflash.checkpoint.parse import parse_checkpoint, parse_headers
from trtllm_dflash.checkpoint.weights import layout
from trtllm_dflash.config import DrafterConfig
from trtllm_dflash.errors import DFlashError

BASES = [Tiny(), Tiny("dflash2"), Tiny("dspark"), Tiny(own_lm_head=True, draft_vocab_size=100)]

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 300), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6), st.sampled_from(["yarn", "dspark", "full_attention", "DFlash2DraftModel", "gated"]),
)  # fmt: skip
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["rope_type", "factor", "quant_algo", "block_size", "x"]), inner, max_size=3),
    ),
    max_leaves=6,
)
EXTRA_KEYS = [
    "rope_parameters", "quantization_config", "dspark_config", "transformer_layer_config", "draft_vocab_size",
    "aux_hidden_state_layer_ids", "speculators_config", "sample_from_anchor", "num_speculative_tokens", "is_causal",
    "projector_type", "use_swa", "target_hidden_size", "markov_rank", "speculators_model_type", "partial_rotary_factor",
]  # fmt: skip
SHAPES = st.lists(st.integers(0, 300), max_size=4).map(tuple)
DTYPES = st.sampled_from(["F32", "BF16", "F16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "I8"])
EXTRA_NAMES = ["lm_head.weight", "embed_tokens.weight", "model.norm.weight", "d2t", "t2d", "mask_embedding", "junk",
               "layers.999999.mlp.up_proj.weight", "layers.0.self_attn.qkv_proj.weight", "fc.weight_scale"]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tiny checkpoint with a few random changes to configuration and headers."""
    tiny = draw(st.sampled_from(BASES))
    config, headers = copy.deepcopy(tiny.config()), tiny.headers()
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.sampled_from([config, config.get("dflash_config")]))
        if isinstance(place, dict):
            key = draw(st.sampled_from([*place, *EXTRA_KEYS]))
            if draw(st.booleans()):
                place.pop(key, None)
            else:
                place[key] = draw(JSON)
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from([*headers, *EXTRA_NAMES]))
        if draw(st.booleans()):
            headers.pop(name, None)
        else:
            headers[name] = (draw(DTYPES), draw(SHAPES))
    return config, headers


@settings(max_examples=400, deadline=None)
@given(mutated(), st.one_of(st.none(), st.dictionaries(st.sampled_from(["quantization", "x"]), JSON, max_size=2)))
def test_mutated_checkpoints_parse_or_are_refused(
    checkpoint: tuple[dict[str, Any], dict[str, Any]], quantization: dict[str, Any] | None
) -> None:
    config, headers = checkpoint
    try:
        parsed = parse_headers(config, headers, quantization=quantization)
    except DFlashError:
        return
    assert set(layout(parsed.config)) <= set(parsed.sources)
    assert DrafterConfig.from_json(json.loads(json.dumps(parsed.config.to_json()))) == parsed.config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose files the tests below damage and restore."""
    return write_checkpoint(tmp_path_factory.mktemp("fuzz"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    file=st.sampled_from(["config.json", "model.safetensors"]),
    where=st.floats(0, 1),
    cut=st.booleans(),
    noise=st.binary(min_size=1, max_size=8),
)
def test_damaged_files_parse_or_are_refused(folder: Path, file: str, where: float, cut: bool, noise: bytes) -> None:
    path = folder / file
    intact = path.read_bytes()
    header = 4000 if file == "model.safetensors" else len(intact)  # damage to tensor values is no damage to parsing
    at = int(where * min(header, len(intact) - 1))
    message = str(folder)  # also of a checkpoint that survived the damage
    try:
        path.write_bytes(intact[:at] if cut else intact[:at] + noise + intact[at + len(noise) :])
        parse_checkpoint(folder)
    except DFlashError as error:
        message = str(error)
    finally:
        path.write_bytes(intact)
    assert str(folder) in message
