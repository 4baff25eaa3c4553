"""The reference against the authors' own PyTorch code (PyPI ``dflash``), step by step on random small drafters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, _crop_to, _make_cache
from torch import Tensor, nn
from transformers import Qwen3Config

from tests.oracle.drafters import FULL, Case, random_rows
from tests.support.tiny import Tiny, write_files
from tests.support.tolerance import assert_close, assert_ids_equal
from trtllm_dflash.checkpoint.parse import parse_checkpoint
from trtllm_dflash.checkpoint.weights import load_weights
from trtllm_dflash.config import LayerMask, YarnScaling
from trtllm_dflash.limits import Limits
from trtllm_dflash.reference import ops
from trtllm_dflash.reference.drafter import ReferenceDrafter
from trtllm_dflash.runtime.reference_session import ReferenceSession
from trtllm_dflash.runtime.session import ContextTables

V1 = Tiny(hidden_size=48)
V2 = Tiny(family="dflash2", hidden_size=48, conv_group_size=8)
YARN = {"factor": 8.0, "original_max_position_embeddings": 32}
# fmt: off
CASES = {
    "full":                    Case(V1, (FULL, FULL)),
    "sliding":                 Case(replace(V1, sliding_layers=(0, 1), window=9), (LayerMask(9, True),) * 2),
    "mixed":                   Case(replace(V1, sliding_layers=(0,), window=9), (LayerMask(9, True), FULL)),
    "sliding_not_causal":      Case(replace(V1, sliding_layers=(0, 1), window=11, is_causal=False),
                                    (LayerMask(11, False),) * 2),
    "narrow_not_causal":       Case(replace(V1, sliding_layers=(0, 1), window=3, is_causal=False),
                                    (LayerMask(3, False),) * 2),
    "full_causal":             Case(replace(V1, is_causal=True), (LayerMask(None, True),) * 2),
    "yarn":                    Case(replace(V1, yarn=YARN), (FULL, FULL), YarnScaling(8.0, 32)),
    "yarn_attention_factor":   Case(replace(V1, yarn=YARN | {"attention_factor": 1.5}), (FULL, FULL),
                                    YarnScaling(8.0, 32, attention_factor=1.5)),
    "scaled":                  Case(replace(V1, input_embedding_scale=3.0, output_multiplier=0.5,
                                            final_logit_softcapping=9.0), (FULL, FULL)),
    "dflash2":                 Case(V2, (FULL, FULL)),
    "dflash2_sliding":         Case(replace(V2, sliding_layers=(0, 1), window=11, is_causal=False),
                                    (LayerMask(11, False),) * 2),
}
# fmt: on
# Rows ingested and drafts asked for, step by step. The context ends at 2, 8, 9, 17, 22, 28, among them W - 1, W, W + B
# for a window of 9 and a block of 8. Blocks are as wide as trained, narrower, and as narrow as they get.
STEPS = ((2, 7), (6, 7), (1, 4), (8, 7), (5, 1), (6, 7))
SEEDS = (0, 1, 2)


class Authors:
    """The authors' drafter with its own cache, driven as their generation loop drives it."""

    def __init__(self, tiny: Tiny) -> None:
        # Hugging Face drops sliding_window unless use_sliding_window is set; the published files set it.
        words: dict[str, Any] = tiny.config() | {"use_sliding_window": bool(tiny.sliding_layers)}
        model_class = DFlash2DraftModel if tiny.family == "dflash2" else DFlashDraftModel
        self.model = model_class(Qwen3Config(**words)).eval()
        codebooks = {f"candidate_selector.{side}_codebook" for side in ("predecessor", "successor")}
        tensors = tiny.tensors()
        self.model.load_state_dict({f"{n}.weight" if n in codebooks else n: t for n, t in tensors.items()})
        self.cache = _make_cache(self.model.config)
        self.context_len = 0

    @torch.inference_mode()
    def step(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """Ingest ``features [n, K*Ht]``, run a block on ``embeddings [B, H]``; hidden states ``[B, H]``."""
        end = self.context_len + len(features)
        hidden: Tensor = self.model(
            position_ids=torch.arange(self.context_len, end + len(embeddings))[None],
            target_hidden=features[None],
            noise_embedding=embeddings[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        _crop_to(self.cache, end)
        self.context_len = end
        return hidden[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        """Logits ``[m, V]`` of the draft rows; their greedy draft is the argmax."""
        head = nn.Linear(lm_head.shape[1], lm_head.shape[0], bias=False)
        head.weight.copy_(lm_head)
        logits: Tensor = self.model.compute_logits(hidden[1:], head)
        return logits


class World:
    """A case with its random target: embedding, head, features and emitted tokens of every step."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = replace(case, tiny=replace(case.tiny, seed=seed))
        self.config, self.weights = self.case.config(), self.case.weights()
        self.seed = seed
        self.embedding = random_rows(seed + 100, self.config.vocab_size, self.config.hidden_size)
        self.lm_head = random_rows(seed + 200, self.config.vocab_size, self.config.hidden_size)

    def features(self, step: int) -> Tensor:
        return random_rows(1000 * self.seed + step, STEPS[step][0], self.config.feature_size)

    def anchor(self, step: int) -> int:
        return (37 * step + 11 * self.seed + 5) % self.config.vocab_size

    def embeddings(self, step: int) -> Tensor:
        ids = [self.anchor(step)] + [self.config.mask_token_id] * STEPS[step][1]
        return self.embedding[ids] * self.config.input_embedding_scale


class Direct:
    """The reference drafter with its context in plain tensors."""

    def __init__(self, world: World) -> None:
        self.drafter = ReferenceDrafter(world.config, world.weights)
        c = world.config
        self.keys = self.values = torch.empty(0, c.num_layers, c.num_kv_heads, c.head_dim)

    def step(self, features: Tensor, embeddings: Tensor) -> Tensor:
        positions = torch.arange(len(self.keys), len(self.keys) + len(features))
        keys, values = self.drafter.context_kv(features, positions)
        self.keys, self.values = torch.cat((self.keys, keys)), torch.cat((self.values, values))
        end = len(self.keys)
        return self.drafter.block(embeddings, end, self.keys, self.values, torch.arange(end))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_drafts_equal_the_authors(name: str, seed: int) -> None:
    world = World(CASES[name], seed)
    theirs, ours = Authors(world.case.tiny), Direct(world)
    for step in range(len(STEPS)):
        features, embeddings = world.features(step), world.embeddings(step)
        expected, actual = theirs.step(features, embeddings), ours.step(features, embeddings)
        assert_close(actual, expected, ("authors", world.config.family))
        expected_logits, logits = theirs.logits(expected, world.lm_head), ours.drafter.head(actual[1:], world.lm_head)
        assert_close(logits, expected_logits, ("torch", "fp32"))
        assert_ids_equal(ops.top_k(logits, 1)[0][:, 0], expected_logits.argmax(dim=-1))


# A window narrower than the block is refused in a checkpoint; the arithmetic is compared all the same.
@pytest.mark.parametrize("name", [name for name in CASES if name != "narrow_not_causal"])
def test_parser_and_loader_give_what_the_authors_were_compared_with(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    checkpoint = parse_checkpoint(write_files(tmp_path, case.tiny.config(), case.tiny.tensors()))
    assert checkpoint.config == case.config()
    loaded = load_weights(checkpoint)
    for tensor_name, tensor in case.weights().items():
        assert torch.equal(loaded[tensor_name], tensor), tensor_name


def test_every_mask_and_rope_matters() -> None:
    """The cases would be worthless if two of them gave the same hidden states."""
    finals = {}
    for name in CASES:
        world = World(CASES[name], seed=0)
        drafter = Direct(world)
        for step in range(len(STEPS)):
            hidden = drafter.step(world.features(step), world.embeddings(step))
        finals[name] = hidden
    names = list(CASES)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            assert (finals[first] - finals[second]).abs().max() > 1e-2, f"{first} and {second} agree"


class Paged:
    """Two sequences in one session; their pages are scattered over the pool, everything unwritten is NaN."""

    def __init__(self, world: World, page: int) -> None:
        limits = Limits(max_batch_size=2, max_draft_len=7, max_seq_len=32, max_num_tokens=32, tokens_per_block=page)
        self.session = ReferenceSession(world.config, limits, world.weights)
        self.session.bind_target(world.embedding, world.lm_head)
        self.session.k_cache.fill_(torch.nan)
        self.session.v_cache.fill_(torch.nan)
        shuffled = torch.randperm(limits.num_pages - 1, generator=torch.Generator().manual_seed(page)) + 1
        self.page, self.table = page, shuffled.view(2, limits.pages_per_sequence)
        self.lengths = [0, 0]

    def ingest(self, sequence: int, features: Tensor) -> None:
        positions = torch.arange(self.lengths[sequence], self.lengths[sequence] + len(features))
        pages = self.table[sequence][positions // self.page]
        self.session.ingest(features, positions.to(torch.int32), pages, positions % self.page)
        self.lengths[sequence] += len(features)

    def tables(self) -> ContextTables:
        first = (torch.arange(self.table.shape[1]) * self.page).expand(2, -1)
        rows = (torch.tensor(self.lengths)[:, None] - first).clamp(0, self.page)
        table = torch.where(rows > 0, self.table, 0)
        return ContextTables(table.to(torch.int32), first.to(torch.int32), rows.to(torch.int32))


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("name", CASES)
def test_the_paged_session_equals_the_direct_path(name: str, page: int) -> None:
    """Sequence 1 lags one step behind sequence 0, so the batch is ragged and begins with an empty context."""
    world = World(CASES[name], seed=0)
    paged = Paged(world, page)
    direct = [Direct(world), Direct(world)]
    hidden_size, drafter = world.config.hidden_size, direct[0].drafter
    for step, (_, num_drafts) in enumerate(STEPS):
        nothing = torch.empty(0, world.config.feature_size)
        features = [world.features(step), nothing if step == 0 else world.features(step - 1)]
        for sequence in (0, 1):
            paged.ingest(sequence, features[sequence])
        anchors = torch.tensor([world.anchor(step), world.anchor(step + 1)])
        mask_row = world.embedding[world.config.mask_token_id].expand(num_drafts, hidden_size)
        expected = []
        for sequence in (0, 1):
            rows = torch.cat((world.embedding[anchors[sequence]][None], mask_row)) * world.config.input_embedding_scale
            expected.append(drafter.head(direct[sequence].step(features[sequence], rows)[1:], world.lm_head))
        logits = torch.stack(expected)
        positions = torch.tensor(paged.lengths, dtype=torch.int32)
        candidates = paged.session.draft(anchors, positions, paged.tables(), num_drafts)
        ids, values = ops.top_k(logits.flatten(0, 1), 16)
        assert_ids_equal(candidates.ids, ids.view(2, num_drafts, 16), values.view(2, num_drafts, 16))
        assert_close(candidates.values, values.view(2, num_drafts, 16), ("torch", "fp32"))
        assert_close(candidates.logsumexp, logits.logsumexp(dim=-1), ("torch", "fp32"))
