"""Published drafters, from their geometry alone: tensor count, parameters and bytes of the files on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.tiny import Tiny
from trtllm_dflash.checkpoint.parse import parse_checkpoint, parse_headers
from trtllm_dflash.checkpoint.weights import layout, load_weights
from trtllm_dflash.config import LayerMask

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2-135m-dflash-b8"
BF16 = torch.bfloat16


def _27b(**changes: object) -> Tiny:
    return Tiny(**{  # type: ignore[arg-type]
        "hidden_size": 5120, "intermediate_size": 17408, "num_layers": 5, "num_heads": 32, "num_kv_heads": 8,
        "head_dim": 128, "rope_theta": 1e7, "num_target_layers": 64, "vocab_size": 248320, "mask_token_id": 248070,
        "dtype": BF16, **changes,
    })  # fmt: skip


# (geometry, tensors, parameters); the payload is two bytes a parameter
PUBLISHED = {
    "Qwen3-8B-DFlash-b16": (
        _27b(hidden_size=4096, intermediate_size=12288, rope_theta=1e6, num_target_layers=36, vocab_size=151936,
             mask_token_id=151669, block_size=16, target_layer_ids=(1, 9, 17, 25, 33)), 58, 2_097_252_864 // 2),
    "Qwen3-4B-DFlash-b16": (
        _27b(hidden_size=2560, intermediate_size=9728, rope_theta=1e6, num_target_layers=36, vocab_size=151936,
             mask_token_id=151669, block_size=16, target_layer_ids=(1, 9, 17, 25, 33)), 58, 1_074_854_400 // 2),
    "Qwen3.6-35B-A3B-DFlash": (
        _27b(hidden_size=2048, intermediate_size=6144, num_layers=8, num_kv_heads=4, num_target_layers=40,
             block_size=16, target_layer_ids=(1, 10, 19, 28, 37)), 91, 947_990_528 // 2),
    "Qwen3.6-27B-DFlash": (
        _27b(block_size=16, target_layer_ids=(1, 16, 31, 46, 61), sliding_layers=(0, 1, 2, 3), window=2048),
        58, 3_460_426_240 // 2),
    "Qwen3.8-27B-DFlash2": (
        _27b(family="dflash2", block_size=8, target_layer_ids=(5, 19, 33, 47, 61), sliding_layers=(0, 1, 2, 3, 4),
             window=2048, is_causal=False, selector_rank=256), 81, 1_924_404_480),
    "RadixArk Qwen3.8-27B-DSpark": (
        _27b(family="dspark", intermediate_size=10240, num_heads=40, block_size=7, markov_rank=256,
             target_layer_ids=(4, 16, 28, 40, 52)), 62, 1_359_284_737),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_geometry(name: str) -> None:
    tiny, tensors, parameters = PUBLISHED[name]
    parsed = parse_headers(tiny.config(), tiny.headers())
    assert len(tiny.headers()) == tensors
    assert parsed.num_parameters == parameters
    assert parsed.payload_bytes == 2 * parameters
    assert parsed.config.target_hidden_size == tiny.hidden_size
    assert sum(torch.Size(shape).numel() for shape in layout(parsed.config).values()) == parameters


def test_sliding_layers_of_qwen36_27b_are_causal_and_those_of_dflash2_are_not() -> None:
    def masks(name: str) -> tuple[LayerMask, ...]:
        tiny = PUBLISHED[name][0]
        return parse_headers(tiny.config(), tiny.headers()).config.layer_masks

    sliding, full = LayerMask(2048, causal=True), LayerMask(None, causal=False)
    assert masks("Qwen3.6-27B-DFlash") == (*[sliding] * 4, full)
    assert masks("Qwen3.8-27B-DFlash2") == (LayerMask(2048, causal=False),) * 5


def test_example_drafter_parses_and_loads() -> None:
    checkpoint = parse_checkpoint(EXAMPLE)
    config = checkpoint.config
    assert len(checkpoint.files.headers) == 36
    assert checkpoint.num_parameters == 12_280_704
    assert (config.family, config.block_size, config.max_draft_len, config.first_draft_row) == ("dflash", 8, 7, 1)
    assert (config.hidden_size, config.num_layers, config.head_dim) == (576, 3, 64)
    assert config.target_layer_ids == (1, 8, 14, 20, 27)
    assert (config.mask_token_id, config.rope.theta, config.dtype) == (16, 100000.0, "bfloat16")
    weights = load_weights(checkpoint)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == layout(config)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    kept = checkpoint.files.tensor("layers.2.self_attn.v_proj.weight")
    assert torch.equal(weights["qkv"][2, config.q_size + config.kv_size :], kept)
