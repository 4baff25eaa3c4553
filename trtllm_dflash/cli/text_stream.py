"""Tokens to text while they arrive, with drafted-and-accepted tokens marked."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from .report import Prompt


class TextStream:
    """Prints a text token by token: accepted drafts green on a terminal, in ``[ ]`` everywhere else.

    Invariant: what has been printed is the decoding of the tokens so far, but for a tail that is not a whole
    character yet (byte-level tokenizers split characters).
    """

    def __init__(self, tokenizer: Any, console: Console, prompt: Prompt) -> None:
        self._tokenizer = tokenizer
        self._console = console
        self._colour = console.is_terminal
        self._token_ids: list[int] = []
        self._printed = 0
        self._marking = False
        mark = "green" if self._colour else "[in brackets]"
        console.rule(f"{prompt.kind} (drafted and accepted: {mark})", align="left", characters="-")
        console.print(Text(f"{prompt.text.strip()}\n"), soft_wrap=True)

    def __call__(self, token_id: int, drafted: bool) -> None:
        """Print what this token adds to the text."""
        self._token_ids.append(token_id)
        text = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._print(text, drafted)

    def close(self) -> None:
        """Print a tail that has stayed unfinished, and end the mark and the line."""
        self._print(self._tokenizer.decode(self._token_ids, skip_special_tokens=True), False)
        self._mark(False)
        self._write("\n\n", False)

    def _print(self, text: str, drafted: bool) -> None:
        piece = text[self._printed :]
        self._printed = len(text)
        if piece:
            self._mark(drafted)
            self._write(piece, drafted)

    def _mark(self, drafted: bool) -> None:
        if not self._colour and drafted != self._marking:
            self._write("[" if drafted else "]", False)
        self._marking = drafted

    def _write(self, text: str, drafted: bool) -> None:
        style = "green" if drafted and self._colour else ""
        self._console.print(Text(text, style=style), end="", soft_wrap=True)
