"""Broken configurations and headers: each is refused with a message that names field or tensor and both values."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tiny import Tiny
from trtllm_dflash.checkpoint.parse import parse_headers
from trtllm_dflash.errors import CheckpointError, DFlashError, UnsupportedError

DROP = object()
V2, DSPARK = Tiny("dflash2"), Tiny("dspark")
SLIDING = Tiny(sliding_layers=(1,), window=16)
OWN = Tiny(own_embedding=True, own_lm_head=True)
REDUCED = Tiny(own_lm_head=True, draft_vocab_size=100)
BIG = ("F32", (8, 8))


def broken(tiny: Tiny, config: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """Parse after setting (or dropping) config paths and tensors."""
    values, headers = tiny.config(), tiny.headers()
    for path, value in config.items():
        *sections, key = path.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        if value is DROP:
            place.pop(key)
        else:
            place[key] = value
    for name, header in tensors.items():
        if header is DROP:
            headers.pop(name)
        else:
            headers[name] = header
    return parse_headers(values, headers)


# name: (checkpoint, config changes, tensor changes, words of the message)
WRONG: dict[str, tuple[Tiny, dict[str, Any], dict[str, Any], list[str]]] = {
    # fields
    "hidden size missing": (Tiny(), {"hidden_size": DROP}, {}, ["hidden_size is missing"]),
    "layers missing": (Tiny(), {"num_hidden_layers": DROP}, {}, ["num_hidden_layers is missing"]),
    "mask id missing": (Tiny(), {"dflash_config.mask_token_id": DROP}, {}, ["mask_token_id is missing"]),
    "mask id null": (Tiny(), {"dflash_config.mask_token_id": None}, {}, ["mask_token_id is missing"]),
    "theta missing": (Tiny(), {"rope_theta": DROP}, {}, ["rope_theta is missing"]),
    "size is text": (Tiny(), {"hidden_size": "64"}, {}, ["hidden_size is '64'", "integer"]),
    "size is a float": (Tiny(), {"hidden_size": 64.0}, {}, ["hidden_size is 64.0", "integer"]),
    "size is true": (Tiny(), {"num_attention_heads": True}, {}, ["num_attention_heads is True", "integer"]),
    "size is zero": (Tiny(), {"vocab_size": 0}, {}, ["vocab_size is 0", "from 1"]),
    "eps is negative": (Tiny(), {"rms_norm_eps": -1e-6}, {}, ["rms_norm_eps is -1e-06", "above 0"]),
    "taps are no list": (Tiny(), {"dflash_config.target_layer_ids": 3}, {}, ["target_layer_ids is 3", "list"]),
    "section is a list": (Tiny(), {"dspark_config": [1]}, {}, ["dspark_config is [1]", "object"]),
    "causality is a number": (Tiny(), {"is_causal": 1}, {}, ["is_causal is 1", "true or false"]),
    # spellings
    "two block sizes": (Tiny(), {"dflash_config.block_size": 16}, {}, ["block_size is 8", "block_size is 16", "agree"]),
    "two mask ids": (Tiny(), {"mask_token_id": 4}, {}, ["dflash_config.mask_token_id is 3", "mask_token_id is 4"]),
    "two thetas": (Tiny(), {"rope_parameters": {"rope_theta": 1e6}}, {},
                   ["rope_theta is 10000.0", "rope_parameters.rope_theta is 1000000.0"]),
    "two scalings": (Tiny(yarn={"factor": 8.0, "original_max_position_embeddings": 32}),
                     {"rope_parameters": {"rope_type": "default"}}, {},
                     ["rope_scaling is YarnScaling", "rope_parameters is None"]),
    "taps unshifted": (Tiny(), {"aux_hidden_state_layer_ids": [1, 2, 4]}, {},
                       ["target_layer_ids is (1, 2, 4)", "aux_hidden_state_layer_ids is (0, 1, 3)"]),
    "two windows": (SLIDING, {"dflash_config.swa_window_size": 32}, {},
                    ["sliding_window is 16", "swa_window_size is 32"]),
    "two kinds of rows": (DSPARK, {"sample_from_anchor": True, "dflash_config.shift_label": False}, {},
                          ["sample_from_anchor is True", "shift_label is False"]),
    # rules
    "heads do not share": (Tiny(), {"num_key_value_heads": 3}, {},
                           ["num_attention_heads is 4", "num_key_value_heads 3"]),
    "odd head": (Tiny(head_dim=15), {}, {}, ["head_dim is 15", "even"]),
    "tap beyond the target": (Tiny(target_layer_ids=(1, 2, 6)), {}, {}, ["[6]", "num_target_layers 6"]),
    "tap of the embedding": (Tiny(), {"dflash_config.target_layer_ids": DROP, "aux_hidden_state_layer_ids": [0, 2, 4]},
                             {}, ["[-1]", "0-based"]),
    "tap twice": (Tiny(target_layer_ids=(1, 1, 2)), {}, {}, ["[1, 1, 2]", "twice"]),
    "taps do not divide fc": (Tiny(), {"dflash_config.target_layer_ids": [0, 1, 2, 3, 4]}, {},
                              ["fc.weight takes 192", "5 target_layer_ids"]),
    "target hidden size": (Tiny(), {"target_hidden_size": 128}, {}, ["target_hidden_size is 128", "3 * 64"]),
    "block of one": (Tiny(block_size=1), {}, {}, ["block_size is 1", "at least 2"]),
    "window below block": (Tiny(sliding_layers=(0,), window=7), {}, {}, ["sliding_window is 7", "8 rows"]),
    "no window": (Tiny(sliding_layers=(0,)), {}, {}, ["sliding_window is None", "layers 0 slide"]),
    "window of 0": (Tiny(sliding_layers=(1,), window=0), {}, {}, ["sliding_window is 0", "layers 1 slide"]),
    "layer types too short": (Tiny(), {"layer_types": ["full_attention"]}, {},
                              ["layer_types has 1", "num_hidden_layers is 2"]),
    "sliding switched off": (SLIDING, {"use_sliding_window": False}, {},
                             ["use_sliding_window is false", "layer_types makes layers 1 slide"]),
    "swa and causal": (Tiny(window=16), {"dflash_config.use_swa": True, "is_causal": True}, {},
                       ["use_swa is true", "is_causal is True"]),
    "causal twice": (SLIDING, {"is_causal": True, "sliding_window_non_causal": True}, {},
                     ["is_causal is True", "sliding_window_non_causal is True"]),
    "v2 silent on causality": (Tiny("dflash2", sliding_layers=(0,), window=16), {}, {}, ["is_causal is missing"]),
    "mask id outside": (Tiny(mask_token_id=160), {}, {}, ["mask_token_id is 160", "vocab_size is 160"]),
    "draft vocabulary larger": (Tiny(), {"draft_vocab_size": 161}, {},
                                ["draft_vocab_size is 161", "vocab_size is 160"]),
    "draft vocabulary without head": (Tiny(draft_vocab_size=100), {}, {},
                                      ["draft_vocab_size is 100", "lm_head.weight"]),
    "tied head": (Tiny(own_embedding=True), {"tie_word_embeddings": True}, {},
                  ["tie_word_embeddings is true", "lm_head.weight is missing"]),
    "more proposals than trained": (Tiny(), {"num_speculative_tokens": 8}, {},
                                    ["num_speculative_tokens is 8", "trained for 7"]),
    "groups do not divide": (V2, {"dflash_config.conv_group_size": 24}, {},
                             ["conv_group_size is 24", "hidden_size 64"]),
    "v2 with half a config": (V2, {"dflash_config.selector_rank": DROP}, {}, ["selector_rank is missing"]),
    "reduced v2": (Tiny("dflash2", own_lm_head=True, draft_vocab_size=100), {}, {},
                   ["draft_vocab_size is 100", "vocab_size 160", "codebooks"]),
    "rows unsettled": (DSPARK, {"sample_from_anchor": False}, {}, ["block_size is 7", "7 drafts or 6", "it is None"]),
    "rows contradictory": (DSPARK, {"sample_from_anchor": False, "num_speculative_tokens": 5}, {},
                           ["block_size is 7", "it is 5"]),
    # family
    "no architecture": (Tiny(), {"architectures": DROP}, {}, ["architectures is None", "DFlashDraftModel"]),
    "two architectures": (Tiny(), {"architectures": ["DFlashDraftModel", "DFlash2DraftModel"]}, {},
                          ["architectures is"]),
    "v2 tensors in v1": (V2, {"architectures": ["DFlashDraftModel"]}, {},
                         ["contradictory", "architecture DFlashDraftModel", "conv_kernel_size 2", "attention_conv"]),
    "v1 called v2": (Tiny(), {"architectures": ["DFlash2DraftModel"]}, {},
                     ["contradictory", "architecture DFlash2DraftModel", "no configuration key"]),
    "dspark called v1": (DSPARK, {"architectures": ["DFlashDraftModel"]}, {},
                         ["contradictory", "projector_type 'dspark'", "markov_head.markov_w1.weight"]),
    "dspark tensors only": (DSPARK, {"architectures": ["DFlashDraftModel"], "dflash_config":
                                     {"mask_token_id": 3, "target_layer_ids": [1, 2, 4]}}, {},
                            ["contradictory", "architecture DFlashDraftModel", "dspark: tensors"]),
    # tensors
    "tensor missing": (Tiny(), {}, {"norm.weight": DROP}, ["1 tensors are missing: norm.weight"]),
    "fc missing": (Tiny(), {}, {"fc.weight": DROP}, ["missing: fc.weight"]),
    "part missing": (Tiny(), {}, {"layers.1.self_attn.k_proj.weight": DROP},
                     ["missing: layers.1.self_attn.k_proj.weight"]),
    "tensor left over": (Tiny(), {}, {"layers.0.extra.weight": BIG}, ["no use", "layers.0.extra.weight"]),
    "layers beyond the config": (Tiny(), {"num_hidden_layers": 1, "layer_types": ["full_attention"]}, {},
                                 ["num_hidden_layers is 1", "2 layers (0, 1)"]),
    "layers short of the config": (Tiny(), {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, {},
                                   ["num_hidden_layers is 3", "2 layers (0, 1)"]),
    "wrong shape": (Tiny(), {}, {"layers.0.mlp.up_proj.weight": ("F32", (64, 96))},
                    ["layers.0.mlp.up_proj.weight has shape [64, 96]", "[I, H] = [96, 64]"]),
    "fc is a vector": (Tiny(), {}, {"fc.weight": ("F32", (64,))}, ["fc.weight has shape [64]", "[H, K*Ht]"]),
    "fc is empty": (OWN, {}, {"fc.weight": ("F32", (64, 0))}, ["fc.weight takes 0 inputs", "3 target_layer_ids"]),
    "wrong rank": (Tiny(), {}, {"norm.weight": ("F32", (64, 1))}, ["norm.weight has shape [64, 1]", "[H] = [64]"]),
    "head dim guessed wrong": (Tiny(head_dim=32), {"head_dim": DROP}, {},
                               ["q_norm.weight has shape [32]", "[D] = [16]"]),
    "fused and split": (Tiny(), {}, {"layers.0.self_attn.qkv_proj.weight": ("F32", (128, 64))},
                        ["layers.0.self_attn.q_proj.weight and layers.0.self_attn.qkv_proj.weight"]),
    "prefix twice": (Tiny(), {}, {"model.norm.weight": ("F32", (64,))}, ["norm.weight and model.norm.weight"]),
    "alias twice": (Tiny(), {}, {"encoder.fc.weight": ("F32", (64, 192))}, ["fc.weight and encoder.fc.weight"]),
    "codebook of another vocabulary": (V2, {}, {"candidate_selector.successor_codebook": ("F32", (159, 8))},
                                       ["successor_codebook has shape [159, 8]", "[V, r] = [160, 8]"]),
    "markov announced and absent": (DSPARK, {}, {"markov_head.markov_w1.weight": DROP,
                                                 "markov_head.markov_w2.weight": DROP},
                                    ["2 tensors are missing", "markov_head.markov_w1.weight"]),
    "confidence announced and absent": (Tiny("dspark", confidence=False),
                                        {"dflash_config.enable_confidence_head": True}, {},
                                        ["missing: confidence_head.proj.weight"]),
    "confidence unannounced": (DSPARK, {"dflash_config.enable_confidence_head": False}, {},
                               ["no use", "confidence_head.proj.weight"]),
    "gate without gated head": (Tiny("dspark", markov_head_type="gated"), {"dflash_config.markov_head_type": "vanilla"},
                                {}, ["no use", "markov_head.gate_proj.weight"]),
    "confidence width": (DSPARK, {"dflash_config.confidence_head_with_markov": False}, {},
                         ["confidence_head.proj.weight has shape [1, 72]", "[1, H] = [1, 64]"]),
    "head of another vocabulary": (OWN, {}, {"lm_head.weight": ("F32", (161, 64))},
                                   ["lm_head.weight has shape [161, 64]", "[Vd, H] = [160, 64]"]),
    "map missing": (REDUCED, {}, {"d2t": DROP, "t2d": DROP}, ["missing: d2t"]),
    "map of another length": (REDUCED, {}, {"d2t": ("I64", (99,))}, ["d2t has shape [99]", "[Vd] = [100]"]),
    "map of floats": (REDUCED, {}, {"d2t": ("F32", (100,))}, ["d2t has dtype F32", "integer"]),
    "mask of another vocabulary": (REDUCED, {}, {"t2d": ("BOOL", (159,))}, ["t2d has shape [159]", "[V] = [160]"]),
}  # fmt: skip


UNSUPPORTED: dict[str, tuple[Tiny, dict[str, Any], dict[str, Any], list[str]]] = {
    "attention bias": (Tiny(), {"attention_bias": True}, {}, ["attention with biases", "attention_bias True"]),
    "bias tensors": (Tiny(), {}, {"layers.0.self_attn.q_proj.bias": ("F32", (64,))}, ["biases", "q_proj.bias"]),
    "mlp bias": (Tiny(), {"mlp_bias": True}, {}, ["MLP with biases"]),
    "laguna by name": (Tiny(), {"architectures": ["DFlashLagunaForCausalLM"]}, {}, ["Laguna", "input_layernorm"]),
    "laguna by tensor": (Tiny(), {}, {"aux_hidden_norms.0.weight": ("F32", (64,))}, ["Laguna", "aux_hidden_norms.0"]),
    "laguna by gate": (Tiny(), {}, {"layers.0.self_attn.g_proj.weight": ("F32", (4, 64))}, ["Laguna", "g_proj"]),
    "sinks": (Tiny(), {}, {"layers.0.self_attn.sinks": ("F32", (4,))}, ["MiMo", "sinks"]),
    "value scale": (Tiny(), {"dflash_config.attention_value_scale": 0.7}, {}, ["MiMo", "attention_value_scale 0.7"]),
    "domino by projector": (Tiny(), {"dflash_config.projector_type": "domino"}, {}, ["Domino", "GRU"]),
    "domino by key": (Tiny(), {"dflash_config.gru_hidden_dim": 64}, {}, ["Domino", "gru_hidden_dim 64"]),
    "domino by tensor": (Tiny(), {}, {"prefix_gru.weight_ih_l0": BIG}, ["Domino", "prefix_gru"]),
    "deepseek bundle": (Tiny(), {"architectures": ["DeepseekV4ForCausalLM"]}, {}, ["DeepSeek-V4", "latent attention"]),
    "jetspec": (DSPARK, {"dspark_config.causal_head": True}, {}, ["JetSpec", "causal_head True"]),
    "experts": (Tiny(), {}, {"layers.0.mlp.experts.0.up.weight": BIG}, ["mixture-of-experts"]),
    "gemma norm": (Tiny(), {"use_gemma_norm": True}, {}, ["Gemma norm", "weight + 1"]),
    "interleaved": (Tiny(), {"is_neox_style": False}, {}, ["interleaved", "is_neox_style False"]),
    "activation": (Tiny(), {"hidden_act": "gelu"}, {}, ["hidden_act is 'gelu'", "silu"]),
    "layer type": (Tiny(), {"layer_types": ["full_attention", "linear_attention"]}, {}, ["linear_attention"]),
    "rope type": (Tiny(), {"rope_scaling": {"rope_type": "llama3"}}, {}, ["llama3", "default or yarn"]),
    "architecture": (Tiny(), {"architectures": ["EagleModel"]}, {}, ["'EagleModel'", "DFlashDraftModel"]),
    "unknown key": (Tiny(), {"dflash_config.novelty": 1}, {}, ["dflash_config.novelty"]),
    "projector": (Tiny(), {"dflash_config.projector_type": "mamba"}, {}, ["projector_type", "'mamba'"]),
    "rank not of 8": (V2, {"dflash_config.selector_rank": 12}, {}, ["selector_rank is 12", "multiple of 8"]),
    "rank above 256": (DSPARK, {"dflash_config.markov_rank": 512}, {}, ["markov_rank is 512", "256"]),
    "candidates": (V2, {"dflash_config.selector_top_k": 8}, {}, ["selector_top_k is 8", "16"]),
    "taps of the convolution": (V2, {"dflash_config.conv_kernel_size": 3}, {}, ["conv_kernel_size is 3", "2"]),
    "mixed dtypes": (Tiny(), {}, {"norm.weight": ("BF16", (64,))}, ["several dtypes", "BF16: norm.weight", "F32: fc"]),
    "doubles": (Tiny(), {}, {n: ("F64", s) for n, (_, s) in Tiny().headers().items()}, ["dtype F64", "BF16"]),
    "nvfp4 by ModelOpt": (Tiny(), {}, {"layers.0.mlp.up_proj.weight_scale_2": ("F32", ())},
                          ["NVFP4 (ModelOpt)", "weight_scale_2"]),
    "nvfp4 by compressed-tensors": (Tiny(), {}, {"layers.0.mlp.up_proj.weight_packed": ("U8", (96, 32))},
                                    ["NVFP4 (compressed-tensors)", "weight_packed"]),
    "fp8": (Tiny(), {}, {"layers.0.mlp.up_proj.weight": ("F8_E4M3", (96, 64))}, ["format FP8", "F8_E4M3", "up_proj"]),
    "fp8 blocks": (Tiny(), {}, {"layers.0.mlp.up_proj.weight_scale_inv": ("F32", (1, 1))}, ["128x128"]),
    "gptq": (Tiny(), {}, {"layers.0.mlp.up_proj.qweight": ("I32", (8, 96))}, ["GPTQ", "qweight"]),
    "cache scales": (Tiny(), {}, {"layers.0.self_attn.k_scale": ("F32", ())}, ["key/value cache", "k_scale"]),
    "declared": (Tiny(), {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, {},
                 ["NVFP4 (ModelOpt)", "quantization_config says", "NVFP4"]),
    "declared and unknown": (Tiny(), {"quantization_config": {"quant_method": "novel"}}, {}, ["unknown", "novel"]),
}  # fmt: skip


def _message(error: type[DFlashError], case: tuple[Tiny, dict[str, Any], dict[str, Any], list[str]]) -> str:
    with pytest.raises(error) as caught:
        broken(*case[:3])
    assert type(caught.value) is error
    return str(caught.value)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    message = _message(CheckpointError, WRONG[name])
    assert all(word in message for word in WRONG[name][3]), message


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_implemented_is_named(name: str) -> None:
    message = _message(UnsupportedError, UNSUPPORTED[name])
    assert all(word in message for word in UNSUPPORTED[name][3]), message


def test_hf_quant_config_is_a_witness() -> None:
    quantization = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A16_NVFP4"}}
    with pytest.raises(UnsupportedError, match=r"NVFP4 \(ModelOpt\).*hf_quant_config.json says quant_algo W4A16_NVFP4"):
        parse_headers(Tiny().config(), Tiny().headers(), quantization=quantization)


@pytest.mark.parametrize("section", [None, {}, {"quant_algo": None, "kv_cache_quant_algo": None}])
def test_switched_off_quantization_is_none(section: Any) -> None:
    config = Tiny().config() | {"quantization_config": section}
    assert parse_headers(config, Tiny().headers(), quantization={"quantization": section}).config.family == "dflash"


def test_all_problems_come_in_one_message() -> None:
    with pytest.raises(CheckpointError) as caught:
        broken(
            Tiny(),
            {"hidden_size": "64", "dflash_config.mask_token_id": 999, "attention_bias": True, "num_key_value_heads": 3},
            {"norm.weight": DROP, "layers.0.self_attn.q_norm.weight": ("F32", (8,)), "surplus": BIG},
        )
    message = str(caught.value)
    for part in ("hidden_size is '64'", "mask_token_id is 999", "attention_bias True", "num_key_value_heads 3",
                 "missing: norm.weight", "q_norm.weight has shape [8], expected [D] = [16]", "surplus"):  # fmt: skip
        assert part in message, message


def test_unsupported_only_when_nothing_is_wrong() -> None:
    with pytest.raises(UnsupportedError):
        broken(Tiny(), {"attention_bias": True, "hidden_act": "gelu"}, {})
    with pytest.raises(CheckpointError):
        broken(Tiny(), {"attention_bias": True, "hidden_act": "gelu"}, {"norm.weight": DROP})
