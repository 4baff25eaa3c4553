"""RULES: what must hold between the facts of a checkpoint, with both sides named. One function, one rule.

A rule that reads a value which could not be read ends there: its absence has been reported.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..heads.rows import Rule
from ..heads.values import Unread, Values
from .findings import Findings


def _heads_share_keys(v: Values) -> Iterator[str]:
    queries, keys = v["num_heads"], v["num_kv_heads"]
    if queries % keys:
        yield f"num_attention_heads is {queries}, but must be a multiple of num_key_value_heads {keys}"


def _head_dim_is_even(v: Values) -> Iterator[str]:
    if v["head_dim"] % 2 or v["head_dim"] < 2:
        yield f"head_dim is {v['head_dim']}, expected an even number: RoPE pairs dimensions"


def _taps_are_blocks(v: Values) -> Iterator[str]:
    ids, layers = v["target_layer_ids"], v["num_target_layers"]
    end = "num_target_layers" if layers is None else f"num_target_layers {layers}"
    outside = [i for i in ids if i < 0 or (layers is not None and i >= layers)]
    if outside:
        yield f"target_layer_ids {list(ids)} has {outside}, expected 0-based blocks from 0 to below {end}"
    if len(set(ids)) != len(ids):
        yield f"target_layer_ids {list(ids)} names a block twice, expected {len(ids)} different ones"


def _features_fit(v: Values) -> Iterator[str]:
    width, taps = v["fc_width"], v["num_taps"]
    if width % taps or width == 0:
        yield (
            f"fc.weight takes {width} inputs, not a multiple of the {taps} target_layer_ids; "
            "expected taps * target hidden size"
        )


def _target_has_drafter_width(v: Values) -> Iterator[str]:
    hidden, target = v["hidden_size"], v["target_hidden_size"]
    if hidden != target and not (v["owns_embedding"] and v["owns_lm_head"]):
        yield (
            f"fc.weight takes {v['fc_width']} inputs, so with {v['num_taps']} taps the target's hidden size is "
            f"{target}, but hidden_size is {hidden}; expected the same, or the drafter's own embed_tokens.weight and "
            "lm_head.weight"
        )
    given = v["given_target_hidden_size"]
    if given is not None and given != target:
        yield f"target_hidden_size is {given}, but fc.weight takes {v['fc_width']} = {v['num_taps']} * {target} inputs"


def _window_covers_block(v: Values) -> Iterator[str]:
    rows = v["max_draft_len"] + v["first_draft_row"]
    windows = [mask.window for mask in v["layer_masks"] if mask.window is not None]
    if windows and min(windows) < rows:
        yield f"sliding_window is {min(windows)}, but a block has {rows} rows; expected at least as many"


def _mask_token_exists(v: Values) -> Iterator[str]:
    if v["mask_token_id"] >= v["vocab_size"] and not v["has_mask_embedding"]:
        yield f"mask_token_id is {v['mask_token_id']}, but vocab_size is {v['vocab_size']}; expected an embedding row"


def _mask_embedding_is_of_the_mask_token(v: Values) -> Iterator[str]:
    told = v["mask_embedding_id"]
    if told is not None and told != v["mask_token_id"]:
        yield (
            f"mask_embedding.pt is of mask_token_id {told}, but config.json says mask_token_id {v['mask_token_id']}; "
            "the two must agree"
        )


def _draft_vocabulary_is_part(v: Values) -> Iterator[str]:
    draft, vocab = v["draft_vocab_size"], v["vocab_size"]
    if draft > vocab:
        yield f"draft_vocab_size is {draft}, but vocab_size is {vocab}; expected at most as many"
    if draft < vocab and not v["owns_lm_head"]:
        yield (
            f"draft_vocab_size is {draft} and vocab_size {vocab}, but lm_head.weight is missing; "
            f"expected a head of {draft} rows"
        )


def _tied_head_is_stored(v: Values) -> Iterator[str]:
    if v["tie_word_embeddings"] and v["owns_embedding"] and not v["owns_lm_head"]:
        yield (
            "tie_word_embeddings is true and embed_tokens.weight is the drafter's own, but lm_head.weight is missing: "
            "whose head is meant is not clear; store lm_head.weight, or set tie_word_embeddings to false"
        )


def _proposals_fit(v: Values) -> Iterator[str]:
    asked, trained = v["num_speculative_tokens"], v["max_draft_len"]
    if asked is not None and asked > trained:
        yield (
            f"num_speculative_tokens is {asked}, but block_size {v['block_size']} was trained for {trained} drafts; "
            "expected at most as many"
        )


RULES: tuple[Rule, ...] = (
    _heads_share_keys, _head_dim_is_even, _taps_are_blocks, _features_fit, _target_has_drafter_width,
    _window_covers_block, _mask_token_exists, _mask_embedding_is_of_the_mask_token,
    _draft_vocabulary_is_part, _tied_head_is_stored, _proposals_fit,
)  # fmt: skip


def check_rules(rules: tuple[Rule, ...], values: Values, findings: Findings) -> None:
    """Note every violation of every rule whose values are known."""
    for rule in rules:
        try:
            for problem in rule(values):
                findings.add(problem)
        except Unread:
            continue
