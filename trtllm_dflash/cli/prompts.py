"""Prompts: from flags or a file, to token ids, and whether they fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DFlashError, Problems
from .report import Prompt


def read_prompts(texts: Sequence[str] | None, file: Path | None) -> list[tuple[str, str]]:
    """Prompts and their kinds, from a list or else from a file; every unusable one is named in one message."""
    pairs = [(text, "prompt") for text in texts or ()] if file is None else _prompts_of_file(file)
    problems = Problems("prompts", "give text")
    for index, (text, _) in enumerate(pairs):
        problems.check(bool(text.strip()), f"prompt {index}: is empty")
        problems.check(_is_unicode(text), f"prompt {index}: {text[:40]!r} is not Unicode text")
    problems.raise_as(DFlashError)
    return pairs


def _prompts_of_file(path: Path) -> list[tuple[str, str]]:
    """Lines of ``{"prompt": text, "kind": text}``; the kind may be absent, empty lines do not count."""
    if path.exists() and not path.is_file():
        raise DFlashError(f"{path}: is not a regular file; expected JSON lines")
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DFlashError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    problems = Problems(str(path), 'expected lines of {"prompt": "text"}, with "kind": "text" where wanted')
    pairs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt, kind = entry["prompt"], entry.get("kind", "prompt")
            if not (isinstance(prompt, str) and isinstance(kind, str)) or kind == "all":
                raise TypeError
            pairs.append((prompt, kind))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            problems.add(f"line {number}: {line[:60]!r}")
    if not pairs:
        problems.add("no prompts in it")
    problems.raise_as(DFlashError)
    return pairs


def _is_unicode(text: str) -> bool:
    """Whether text can be written as UTF-8: JSON escapes and broken command lines may hold half characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode(tokenizer: Any, text: str, raw: bool, vocabulary: int) -> list[int]:
    """Token ids of a user turn. Names of special tokens inside the text count as these tokens, as in transformers."""
    try:
        if raw or tokenizer.chat_template is None:
            ids = list(tokenizer(text)["input_ids"])
        else:
            turn = [{"role": "user", "content": text}]
            ids = list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"])
    except Exception as error:  # chat templates are programs, and tokenizers raise whatever they like
        raise DFlashError(
            f"prompt {text[:40]!r}: the target's tokenizer or chat template refuses it"
            f" ({type(error).__name__}: {error}); {'give other text' if raw else 'try --raw'}"
        ) from error
    if ids and max(ids) >= vocabulary:
        raise DFlashError(
            f"prompt {text[:40]!r}: the tokenizer gives id {max(ids)}, the target's embedding has {vocabulary} rows;"
            " use the target's own tokenizer"
        )
    return ids


def check_lengths(prompts: list[Prompt], max_tokens: int, max_seq_len: int) -> None:
    """Refuse prompts that do not fit before any of them runs."""
    problems = Problems("prompts")
    for index, prompt in enumerate(prompts):
        needed = len(prompt.token_ids) + max_tokens
        problems.check(
            needed <= max_seq_len,
            f"prompt {index} has {len(prompt.token_ids)} tokens and may get {max_tokens} more, {needed} in all, but the"
            f" engine's max_seq_len is {max_seq_len}; lower --max_tokens or build with --max_seq_len {needed}",
        )
    problems.raise_as(DFlashError)
