"""Streaming: marks around accepted drafts, and no half characters."""

from __future__ import annotations

import io

from rich.console import Console

from trtllm_dflash.cli.report import Prompt
from trtllm_dflash.cli.text_stream import TextStream


class ByteTokenizer:
    """A token is a byte, as in byte-level vocabularies."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(ids).decode("utf-8", errors="replace")


def streamed(tokens: list[tuple[int, bool]], *, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, highlight=False, markup=False, width=80, color_system="standard"
    )
    stream = TextStream(ByteTokenizer(), console, Prompt("the prompt", "kind", [1]))
    for token, drafted in tokens:
        stream(token, drafted)
    stream.close()
    return out.getvalue().split("the prompt\n\n", 1)[1]


def marked(text: str) -> list[tuple[int, bool]]:
    """Upper-case letters are drafted."""
    return [(ord(c), c.isupper()) for c in text]


def test_runs_of_accepted_drafts_stand_in_brackets() -> None:
    assert streamed(marked("abCDeF")) == "ab[CD]e[F]\n\n"


def test_on_a_terminal_they_are_green() -> None:
    assert streamed(marked("aB"), terminal=True) == "a\x1b[32mB\x1b[0m\n\n"


def test_a_character_is_printed_when_its_last_byte_arrives() -> None:
    euro = [(byte, byte == 0xAC) for byte in "€".encode()]
    assert streamed([(ord("a"), False), *euro, (ord("b"), False)]) == "a[€]b\n\n"


def test_text_that_looks_like_markup_is_printed_as_it_is() -> None:
    assert streamed(marked("x[bold]y")) == "x[bold]y\n\n"


def test_an_unfinished_tail_is_printed_at_the_end() -> None:
    assert streamed([(ord("a"), False), ("€".encode()[0], False)]) == "a\N{REPLACEMENT CHARACTER}\n\n"
