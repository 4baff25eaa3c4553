"""The reference drafter as a whole: types, blocks of every width, and what the other tests take for granted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.oracle.drafters import FULL, SELECTOR, Case, random_rows, v1_case
from tests.support.tiny import Tiny
from tests.support.tolerance import assert_close
from trtllm_dflash.config import LayerMask
from trtllm_dflash.reference.drafter import ReferenceDrafter

FP32 = ("torch", "fp32")
DFLASH2 = Case(Tiny(family="dflash2", hidden_size=48, conv_group_size=8), (FULL, FULL))


def drafter_of(case: Case) -> ReferenceDrafter:
    return ReferenceDrafter(case.config(), case.weights())


def run(drafter: ReferenceDrafter, embeddings: torch.Tensor, context_len: int = 5) -> torch.Tensor:
    positions = torch.arange(context_len)
    keys, values = drafter.context_kv(random_rows(1, context_len, drafter.config.feature_size), positions)
    return drafter.block(embeddings, context_len, keys, values, positions)


@pytest.mark.parametrize("case", [v1_case(FULL, FULL), DFLASH2], ids=["dflash", "dflash2"])
def test_weights_of_any_dtype_are_computed_in_fp32(case: Case) -> None:
    stored = {name: tensor.bfloat16() for name, tensor in case.weights().items()}
    rounded = {name: tensor.float() for name, tensor in stored.items()}
    embeddings = random_rows(2, 8, 48)
    from_stored = run(ReferenceDrafter(case.config(), stored), embeddings)
    assert from_stored.dtype == torch.float32
    assert torch.equal(from_stored, run(ReferenceDrafter(case.config(), rounded), embeddings))


def test_context_rows_depend_on_their_own_feature_and_position_only() -> None:
    drafter = drafter_of(v1_case(FULL, FULL))
    features, positions = random_rows(1, 6, 144), torch.tensor([0, 1, 2, 7, 8, 30])
    keys, values = drafter.context_kv(features, positions)
    assert keys.shape == values.shape == (6, 2, 2, 16)
    for row in range(6):
        key, value = drafter.context_kv(features[row : row + 1], positions[row : row + 1])
        assert_close(key[0], keys[row], FP32)
        assert_close(value[0], values[row], FP32)


def test_context_rows_skip_convolutions_and_input_norms() -> None:
    """Changing every weight that only block rows pass leaves the context K/V as they are."""
    weights = DFLASH2.weights()
    block_only = [name for name in weights if "conv" in name or name in ("input_norm", "q_norm")]
    assert len(block_only) == 6
    changed = weights | {name: weights[name] + 1.0 for name in block_only}
    features, positions = random_rows(1, 3, 144), torch.arange(3)
    before = drafter_of(DFLASH2).context_kv(features, positions)
    after = ReferenceDrafter(DFLASH2.config(), changed).context_kv(features, positions)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("num_rows", range(1, 8))
def test_a_narrower_causal_block_is_a_prefix_of_the_wide_one(num_rows: int) -> None:
    """Nothing of a causal block depends on its width; with DFlash 2 the convolution is causal as well."""
    causal = (LayerMask(None, True),) * 2
    embeddings = random_rows(2, 8, 48)
    for case in (v1_case(*causal), replace(DFLASH2, masks=causal)):
        drafter = drafter_of(case)
        assert_close(run(drafter, embeddings[:num_rows]), run(drafter, embeddings)[:num_rows], FP32)


def test_every_weight_matters() -> None:
    """A tensor that the reference forgot would leave its output unchanged."""
    weights, config, embeddings = DFLASH2.weights(), DFLASH2.config(), random_rows(2, 8, 48)
    before = run(ReferenceDrafter(config, weights), embeddings)
    for name, tensor in weights.items():
        if name in SELECTOR:  # read after the block, by the session and the head's rule
            continue
        for layer in range(config.num_layers) if tensor.shape[0] == config.num_layers else [slice(None)]:
            changed = tensor.clone()
            changed[layer] += 0.1 * random_rows(3, *changed[layer].shape)
            after = run(ReferenceDrafter(config, weights | {name: changed}), embeddings)
            assert (after - before).abs().max() > 1e-4, f"{name}[{layer}]"


def test_T52_a_residual_stream_beyond_fp16_stays_exact() -> None:
    """Embeddings of 1e6: sublayers add to them, the final norm takes the scale out; nothing overflows."""
    case = v1_case(FULL, FULL)
    embeddings = 1e6 * random_rows(2, 8, 48)
    hidden = run(drafter_of(case), embeddings)
    assert embeddings.abs().max() > 65504
    expected = embeddings.double()
    expected = expected / expected.square().mean(dim=-1, keepdim=True).sqrt() * case.weights()["norm"]
    assert hidden.isfinite().all()
    assert (hidden - expected).abs().max() < 1e-4  # what the sublayers add is of order 1 in 1e6
