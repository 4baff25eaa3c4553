"""Stand-ins for what a test does not examine: a tiny real target, a session that computes next to nothing, and
proposers that draft whatever a test wants while they check how the loop treats them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_dflash.config import DrafterConfig, LayerMask, RopeConfig, TargetSpec
from trtllm_dflash.limits import Limits
from trtllm_dflash.runtime.hf_target import HFTarget
from trtllm_dflash.runtime.proposer import DraftProposer, ProposerState
from trtllm_dflash.runtime.session import ContextTables, Session
from trtllm_dflash.runtime.target import TargetOutput

VOCAB = 160
MASK = 3
LIMITS = Limits(max_batch_size=2, max_draft_len=7, max_seq_len=96, max_num_tokens=16, tokens_per_block=8)


def tiny_target(
    *, dtype: torch.dtype = torch.float32, model_type: str = "llama", tokenizer: Any = None, **options: Any
) -> HFTarget:
    """A random model of transformers: hidden 64, 6 layers, 160 tokens. Spread weights, so that its output varies."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(settings | options))
    return HFTarget(AutoModelForCausalLM.from_config(config, dtype=dtype), tokenizer)


def tiny_config(**changes: Any) -> DrafterConfig:
    """A DFlash v1 drafter that fits ``tiny_target``: block 8, taps of blocks 1, 2 and 4."""
    config = DrafterConfig(
        family="dflash", hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        rms_norm_eps=1e-6, rope=RopeConfig(10000.0), layer_masks=(LayerMask(None, False),) * 2, block_size=8,
        max_draft_len=7, first_draft_row=1, mask_token_id=MASK, target_hidden_size=64, target_layer_ids=(1, 2, 4),
        num_target_layers=6, vocab_size=VOCAB, draft_vocab_size=VOCAB, dtype="float32",
    )  # fmt: skip
    return dataclasses.replace(config, **changes)


class FakeSession(Session):
    """Pools and block assembly are the real ones; the models only write down what they were given.

    A stored key is its row's position, a stored value its feature's first element, so that ``held`` reads back what
    the context contains. Draft i of a block anchored at N is the token ``token_at(N + i)``.
    """

    def __init__(
        self, config: DrafterConfig | None = None, limits: Limits = LIMITS, tables: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__(config or tiny_config(), limits, torch.device("cpu"), torch.float32, tables or {})
        self.bind_target(
            torch.arange(VOCAB).float()[:, None].expand(-1, 64), torch.zeros(self.config.draft_vocab_size, 64)
        )
        self.embeddings = self.context = None  # of the last block
        self.ingested: list[int] = []  # rows of each call
        self.spoil: Callable[[Tensor, Tensor], None] = lambda ids, values: None

    @staticmethod
    def token_at(position: int) -> int:
        return 4 + position % (VOCAB - 4)  # never the mask token

    def _run_context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        assert len(features) == len(positions) <= self.limits.max_num_tokens
        self.ingested.append(len(features))
        shape = (len(features), self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
        keys, values = positions.float(), features[:, 0]
        return keys[:, None, None, None].expand(shape), values[:, None, None, None].expand(shape)

    def _run_block(self, embeddings: Tensor, positions: Tensor, context: ContextTables) -> dict[str, Tensor]:
        self.embeddings, self.context = embeddings, context
        rows = torch.arange(embeddings.shape[1])
        hidden = torch.zeros_like(embeddings)
        hidden[:, :, 0] = positions[:, None] + rows
        return {"hidden": hidden}

    def _run_head(self, hidden: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        best = torch.tensor([self.token_at(int(row[0])) for row in hidden], dtype=torch.int32)
        ids = (best[:, None] + torch.arange(16, dtype=torch.int32)) % VOCAB
        values = torch.arange(16, 0, -1).float().expand(len(hidden), 16).clone()
        self.spoil(ids, values)
        return ids, values, torch.full((len(hidden),), 20.0)

    def held(self, context: ContextTables, sequence: int = 0) -> list[tuple[int, float]]:
        """(position, first feature element) of every context row, read from the pools; checks the tables on the way."""
        rows = []
        pages = zip(*(table[sequence].tolist() for table in dataclasses.astuple(context)), strict=True)
        for page, first_position, num_rows in pages:
            assert (page == 0) == (num_rows == 0), "page 0 is the dummy"
            keys, values = self.k_cache[page, 0, :num_rows, 0, 0], self.v_cache[page, 0, :num_rows, 0, 0]
            assert keys.tolist() == list(range(first_position, first_position + num_rows))
            rows += list(zip(map(int, keys.tolist()), values.tolist(), strict=True))
        return rows


class ChainTarget:
    """A target whose next token is a function of the newest one, so that every right draft is known in advance."""

    def __init__(self, following: Callable[[int], int]) -> None:
        self.following = following
        self.spec = TargetSpec("chain", hidden_size=64, num_layers=6, vocab_size=VOCAB, embedding_rows=VOCAB)
        self.embedding = torch.randn(VOCAB, 64)
        self.lm_head = torch.zeros(VOCAB, 64)  # to a drafter all tokens are equal: candidates are the ids 0 to 15
        self.forwarded: list[int] = []  # rows of each forward

    def new_sequence(self, tapped_layers: Sequence[int] = ()) -> _ChainSequence:
        return _ChainSequence(self, len(tapped_layers))


@dataclass
class _ChainSequence:
    target: ChainTarget
    num_taps: int
    length: int = 0

    def forward(self, token_ids: Sequence[int], *, last_only: bool = False) -> TargetOutput:
        self.length += len(token_ids)
        self.target.forwarded.append(len(token_ids))
        following = torch.tensor([self.target.following(token) for token in token_ids])
        logits = torch.nn.functional.one_hot(following, VOCAB).float()
        features = torch.randn(len(token_ids), 64 * self.num_taps) if self.num_taps else None
        return TargetOutput(logits[-1:] if last_only else logits, features)

    def rollback(self, num_rows: int) -> None:
        self.length -= num_rows


@dataclass
class _State:
    features: list[Tensor]
    num_rows: int = 0
    anchor: int | None = None
    proposed: int | None = None
    freed: bool = False


class FakeProposer(DraftProposer):
    """Drafts ``guess(position, num_drafts)``, and asserts that the loop keeps 4.1's invariants around it.

    ``position == rows`` is N == position: no row short (T09), none too many (T08), no hole after a step without drafts.
    """

    def __init__(self, guess: Callable[[int, int], list[int]], taps: Sequence[int] = (0, 1), width: int = 7) -> None:
        self.guess, self.taps, self.width = guess, tuple(taps), width
        self.declines: Counter[str] = Counter()
        self.states: list[_State] = []

    def block_gamma(self) -> int | None:
        return self.width + 1

    def max_num_drafts(self) -> int:
        return self.width

    def tapped_layers(self) -> Sequence[int]:
        return self.taps

    def validate_against_target(self, target: TargetSpec) -> None:
        """Fits any."""

    def alloc_state(self) -> _State:
        self.states.append(_State([]))
        return self.states[-1]

    def alloc_state_for(self, budget_tokens: int) -> _State:
        return self.alloc_state()

    def free_state(self, state: Any) -> None:
        state.freed = True

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        return max_seq_len

    def prefill_drafter(
        self, prompt_tokens: Sequence[int], hiddens: Tensor, state: Any, *, start_position: int = 0
    ) -> int:
        assert start_position == state.num_rows
        assert len(prompt_tokens) == len(hiddens)
        return self._add(state, hiddens)

    def _add(self, state: Any, rows: Tensor) -> int:
        state.features.append(rows)
        state.num_rows += len(rows)
        return len(rows)

    def propose(
        self, last_token: int, position: int, num_drafts: int, state: Any, *, target_hidden_stack: Tensor | None = None,
        grammar_bitmask: Tensor | None = None, grammar: Any = None, draft_embed_target: Any = None,
        sampling: Any = None,
    ) -> list[int]:  # fmt: skip
        if target_hidden_stack is not None:
            self._add(state, target_hidden_stack)
        assert not state.freed
        assert state.proposed is None, "one verdict per propose"
        assert position == state.num_rows, f"anchor at {position}, {state.num_rows} context rows"
        assert 0 <= num_drafts <= self.width
        drafts = self.guess(position, num_drafts)
        state.anchor, state.proposed = last_token, len(drafts)
        return drafts

    def after_verify(self, num_accepted: int, state: Any, *, target_hidden_stack: Tensor | None = None) -> None:
        assert state.proposed is not None
        assert 0 <= num_accepted <= state.proposed
        state.proposed = None
        if target_hidden_stack is not None:
            assert len(target_hidden_stack) == num_accepted + 1
            self._add(state, target_hidden_stack)

    def propose_batch_max(self) -> int:
        return 1

    def propose_batch(
        self, last_tokens: Sequence[int], positions: Sequence[int], num_drafts: Sequence[int],
        states: Sequence[ProposerState], *, target_hidden_stacks: Sequence[Tensor | None] | None = None,
        out_conf: list[list[float]] | None = None,
    ) -> list[list[int]] | None:  # fmt: skip
        return None

    def last_confidence(self) -> float | None:
        return None

    def drafter_rows(self, state: Any) -> int:
        return 0 if state.freed else int(state.num_rows)

    def last_pair_key(self, state: Any) -> int | None:
        return None if state.freed or not state.num_rows else state.num_rows - 1

    def catchup_drafter(self, tokens: Sequence[int], hiddens: Tensor, row_base: int, pos_base: int, state: Any) -> int:
        return self._add(state, hiddens) if row_base == pos_base == state.num_rows else 0

    def take_drafter_kv(self, state: Any) -> Any:
        return None

    def install_drafter_kv(self, state: Any, kv: Any) -> bool:
        return False

    def free_drafter_kv(self, kv: Any) -> None:
        """Nothing was taken."""

    def needs_comm(self) -> bool:
        return False

    def prefill_uses_shared_buffers(self) -> bool:
        return False

    def read_deferred_draft_token(self) -> int:
        return 0
