"""Loading into our layout: foreign names, stacking, dtypes, values that are not finite, and reduced vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiny import Tiny, write_files
from trtllm_dflash.checkpoint.parse import parse_checkpoint, parse_headers
from trtllm_dflash.checkpoint.vocabulary import target_ids
from trtllm_dflash.checkpoint.weights import layout, load_weights
from trtllm_dflash.errors import CheckpointError

CASES = {
    "v1": Tiny(),
    "v1 bf16": Tiny(dtype=torch.bfloat16),
    "v1 fp16": Tiny(dtype=torch.float16),
    "v1 own": Tiny(own_embedding=True, own_lm_head=True, target_hidden_size=48, mask_embedding=True),
    "v1 reduced": Tiny(own_lm_head=True, draft_vocab_size=100),
    "v2": Tiny("dflash2", num_layers=3),
    "dspark": Tiny("dspark"),
    "dspark gated": Tiny("dspark", markov_head_type="gated", confidence_with_markov=False),
    "dspark rnn": Tiny("dspark", markov_head_type="rnn", confidence=False),
    "dspark plain": Tiny("dspark", markov_rank=0, confidence=False),
    "dspark reduced": Tiny("dspark", own_lm_head=True, draft_vocab_size=100),
}


def load(folder: Path, tiny: Tiny, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    return load_weights(parse_checkpoint(write_files(folder, tiny.config(), tensors or tiny.tensors())))


@pytest.mark.parametrize("name", CASES)
def test_weights_have_the_layout_and_dtype_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    tiny = CASES[name]
    checkpoint = parse_checkpoint(write_files(tmp_path, tiny.config(), tiny.tensors()))
    weights = load_weights(checkpoint)
    assert {key: tuple(tensor.shape) for key, tensor in weights.items()} == layout(checkpoint.config)
    assert {tensor.dtype for key, tensor in weights.items() if key != "d2t"} == {tiny.dtype}
    floats = [tensor for key, tensor in weights.items() if key != "d2t"]
    assert sum(tensor.numel() for tensor in floats) == checkpoint.num_parameters
    assert sum(tensor.nbytes for tensor in floats) == parse_headers(tiny.config(), tiny.headers()).payload_bytes


def test_layers_are_stacked_and_parts_concatenated_in_order(tmp_path: Path) -> None:
    tensors, weights = Tiny().tensors(), load(tmp_path, Tiny())
    for layer in range(2):
        attention, mlp = f"layers.{layer}.self_attn.", f"layers.{layer}.mlp."
        q, k, v = weights["qkv"][layer].split([64, 32, 32])
        assert torch.equal(q, tensors[attention + "q_proj.weight"])
        assert torch.equal(k, tensors[attention + "k_proj.weight"])
        assert torch.equal(v, tensors[attention + "v_proj.weight"])
        gate, up = weights["gate_up"][layer].split(96)
        assert torch.equal(gate, tensors[mlp + "gate_proj.weight"])
        assert torch.equal(up, tensors[mlp + "up_proj.weight"])
        assert torch.equal(weights["input_norm"][layer], tensors[f"layers.{layer}.input_layernorm.weight"])


def _renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    found = {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}
    assert found.keys() != tensors.keys(), f"{old} is in no name"
    return found


SPELLINGS = [
    (Tiny(), "layers.", "model.layers."),
    (Tiny(), "fc.weight", "encoder.fc.weight"),
    (Tiny(), "hidden_norm.weight", "encoder.output_norm_enc.weight"),
    (Tiny(own_embedding=True), "embed_tokens", "model.embed_tokens"),
    (Tiny(mask_embedding=True), "mask_embedding", "mask_embedding.weight"),
    (Tiny(own_lm_head=True, draft_vocab_size=100), "d2t", "draft_id_to_target_id"),
    (Tiny("dflash2"), "predecessor_codebook", "predecessor_codebook.weight"),
    (Tiny("dflash2"), "successor_codebook", "successor_codebook.weight"),
    (Tiny("dspark"), "markov_head.markov_w", "markov_w"),
    (Tiny("dspark"), "markov_head.markov_w", "logit_head.markov_head.markov_w"),
    (Tiny("dspark"), "confidence_head.proj", "confidence_proj"),
    (Tiny("dspark"), "confidence_head.proj", "logit_head.confidence_head.proj"),
    (Tiny("dspark", markov_head_type="gated"), "markov_head.gate_proj", "gate_proj"),
    (Tiny("dspark", markov_head_type="rnn"), "markov_head.joint_proj", "joint_proj"),
]


@pytest.mark.parametrize(("tiny", "old", "new"), SPELLINGS, ids=[new for _, _, new in SPELLINGS])
def test_every_spelling_of_a_tensor_loads_alike(tmp_path: Path, tiny: Tiny, old: str, new: str) -> None:
    plain = load(tmp_path / "plain", tiny)
    foreign = load(tmp_path / "foreign", tiny, _renamed(tiny.tensors(), old, new))
    assert plain.keys() == foreign.keys()
    assert all(torch.equal(plain[name], foreign[name]) for name in plain)


@pytest.mark.parametrize(
    ("fused", "parts"),
    [("self_attn.qkv_proj", ["q_proj", "k_proj", "v_proj"]), ("mlp.gate_up_proj", ["gate_proj", "up_proj"])],
)
def test_fused_projections_load_like_their_parts(tmp_path: Path, fused: str, parts: list[str]) -> None:
    module = fused.split(".")[0]
    tensors = Tiny().tensors()
    for layer in range(2):
        rows = [tensors.pop(f"layers.{layer}.{module}.{part}.weight") for part in parts]
        tensors[f"layers.{layer}.{fused}.weight"] = torch.cat(rows)
    plain, foreign = load(tmp_path / "plain", Tiny()), load(tmp_path / "fused", Tiny(), tensors)
    assert all(torch.equal(plain[name], foreign[name]) for name in plain)


def test_buffers_and_verifier_copies_are_ignored_and_noted() -> None:
    headers = Tiny().headers() | {
        "layers.0.self_attn.rotary_emb.inv_freq": ("F32", (8,)), "rotary_emb.inv_freq": ("F32", (8,)),
        "verifier_norm.weight": ("F32", (64,)), "verifier_lm_head.weight": ("F32", (160, 64)),
    }  # fmt: skip
    parsed = parse_headers(Tiny().config(), headers)
    assert any("ignored tensors: layers.0.self_attn.rotary_emb.inv_freq" in note for note in parsed.notes)
    assert parsed.num_parameters == parse_headers(Tiny().config(), Tiny().headers()).num_parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite_are_refused_by_name_and_index(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny = Tiny(dtype=dtype)
    tensors = tiny.tensors()
    tensors["layers.1.self_attn.k_proj.weight"][3, 5] = float("nan")
    tensors["layers.1.self_attn.k_proj.weight"][7, 1] = float("inf")
    tensors["norm.weight"][9] = float("-inf")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, tiny, tensors)
    message = str(caught.value)
    assert "layers.1.self_attn.k_proj.weight is nan at [3, 5] and not finite in 2 places" in message
    assert "norm.weight is -inf at [9]" in message


OFFSETS, KEPT = torch.tensor([0, 0, 3, 3]), torch.tensor([0, 1, 5, 6])
VOCAB = 7
T2D = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, KEPT, True)


@pytest.mark.parametrize("t2d", [T2D, T2D.to(torch.uint8), None])
@pytest.mark.parametrize("table", [OFFSETS, OFFSETS.to(torch.int32), KEPT], ids=["offsets", "int32", "direct"])
def test_offset_and_direct_maps_are_told_apart(table: Tensor, t2d: Tensor | None) -> None:
    ids = target_ids(table, t2d, VOCAB)
    assert ids.dtype == torch.int64
    assert ids.tolist() == KEPT.tolist()


def test_t2d_decides_where_both_readings_are_possible() -> None:
    table = torch.tensor([0, 1, 2])  # target ids 0, 1, 2 or offsets to 0, 2, 4
    for kept in ([0, 1, 2], [0, 2, 4]):
        t2d = torch.zeros(6, dtype=torch.bool).index_fill(0, torch.tensor(kept), True)
        assert target_ids(table, t2d, 6).tolist() == kept
    with pytest.raises(CheckpointError, match=r"starts \[0, 1, 2\], which can be offsets or target ids"):
        target_ids(table, None, 6)


@pytest.mark.parametrize(
    ("table", "t2d", "words"),
    [
        ([5, 1, 0], None, r"starts \[5, 1, 0\]: neither"),
        ([-1, 0, 0], None, "neither"),
        ([0, 0, 5], None, "0 to 6"),
        ([0, 0, 3], T2D, "t2d marks 4 target ids, d2t has 3"),
        ([0, 0, 2, 3], T2D, "t2d marks 4 target ids, d2t has 4"),
    ],
)
def test_contradictory_maps_are_refused(table: list[int], t2d: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        target_ids(torch.tensor(table), t2d, VOCAB)


def test_reduced_vocabulary_gives_the_direct_map(tmp_path: Path) -> None:
    tiny = CASES["v1 reduced"]
    kept = tiny.tensors()["t2d"].nonzero().flatten()
    assert load(tmp_path, tiny)["d2t"].tolist() == kept.tolist()


def test_map_that_contradicts_its_mask_is_refused_while_loading(tmp_path: Path) -> None:
    tiny = CASES["v1 reduced"]
    tensors = tiny.tensors()
    tensors["t2d"] = tensors["t2d"].roll(1)
    with pytest.raises(CheckpointError, match="t2d marks 100 target ids, d2t has 100"):
        load(tmp_path, tiny, tensors)


def test_map_of_a_full_vocabulary_must_be_the_identity(tmp_path: Path) -> None:
    maps = {"t2d": torch.ones(160, dtype=torch.bool)}
    identity = load(tmp_path / "a", Tiny(), Tiny().tensors() | maps | {"d2t": torch.zeros(160, dtype=torch.int64)})
    assert "d2t" not in identity
    with pytest.raises(CheckpointError, match="neither"):
        load(tmp_path / "b", Tiny(), Tiny().tensors() | maps | {"d2t": torch.arange(160).flip(0)})
