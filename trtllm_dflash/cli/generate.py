"""``trtllm-dflash generate``: text from a target and a drafter engine, streamed, then what the drafter was worth."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DFlashError, Problems
from .output import log, print_json, print_table

if TYPE_CHECKING:
    from ..runtime.compare import Difference
    from ..runtime.decode import Generation
    from ..runtime.statistics import DecodeStatistics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--engine_dir", type=Path, required=True, help="engine directory that build wrote")
    parser.add_argument("--target", required=True, help="the model to accelerate: directory, .gguf file or package:NAME")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="a user turn; repeatable")
    source.add_argument("--prompts_file", type=Path, help='JSON lines with "prompt" and, for the table, "kind"')
    parser.add_argument("--max_tokens", type=int, default=160, help="new tokens of a prompt, at most")
    parser.add_argument("--max_draft_len", type=int, help="drafts of a block, at most what the engine was built for")
    parser.add_argument("--raw", action="store_true", help="take prompts as they are, without the chat template")
    parser.add_argument("--compare", action="store_true", help="decode plainly too, and compare text and speed")
    parser.add_argument("--session", choices=("reference",), help="run the oracle instead of the engine's session")
    parser.add_argument("--threads", type=int, help="threads of the target and of the drafter")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text and tables")


@dataclass
class _Prompt:
    text: str
    kind: str
    token_ids: list[int]


@dataclass
class _Answer:
    prompt: _Prompt
    speculative: Generation
    plain: Generation | None = None
    difference: Difference | None = None


def run(args: argparse.Namespace) -> int:
    """Generate for every prompt; exit code 1 if ``--compare`` finds a difference that is not a numerical tie."""
    import torch

    from ..heads.base import HEADS
    from ..runtime.compare import first_difference
    from ..runtime.decode import generate
    from ..runtime.hf_target import load_target
    from ..runtime.open import open_session
    from ..runtime.proposer import SessionProposer
    from .text_stream import TextStream

    if args.threads:
        torch.set_num_threads(args.threads)
    texts = read_prompts(args)
    with log.status("opening the engine and the target", spinner="dots"):
        session = open_session(args.engine_dir, args.session)
        target, tokenizer = load_target(args.target)
        proposer = SessionProposer(session, HEADS[session.config.family])
        proposer.validate_against_target(target.spec)
        session.bind_target(target.embedding, target.lm_head)
    prompts = [_Prompt(text, kind, encode(tokenizer, text, args.raw)) for text, kind in texts]
    _check_lengths(prompts, args.max_tokens, session.limits.max_seq_len)
    decoding = {"max_new_tokens": args.max_tokens, "stop_ids": target.stop_ids}
    answers = []
    for prompt in prompts:
        stream = None
        if not args.json:
            stream = TextStream(tokenizer, _console())
            _console().rule(prompt.kind, align="left", characters="-")
            print(f"{prompt.text.strip()}\n", flush=True)
        speculative = generate(
            target, proposer, prompt.token_ids, num_drafts=args.max_draft_len, on_token=stream, **decoding
        )
        answer = _Answer(prompt, speculative)
        if stream is not None:
            stream.close()
        if args.compare:
            answer.plain = generate(target, None, prompt.token_ids, **decoding)
            answer.difference = first_difference(
                target, prompt.token_ids, speculative.token_ids, answer.plain.token_ids
            )
        answers.append(answer)
    if args.json:
        print_json(_report(answers, tokenizer))
    else:
        _print_report(answers, TextStream(tokenizer, _console()).legend)
    return int(any(a.difference is not None and not a.difference.is_tie for a in answers))


def read_prompts(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Prompts and their kinds; every unusable line is named in one message."""
    if args.prompt:
        pairs = [(text, "prompt") for text in args.prompt]
    else:
        try:
            lines = args.prompts_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DFlashError(f"{args.prompts_file}: cannot be read: {error}") from error
        problems = Problems(str(args.prompts_file))
        pairs = []
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line) if line.strip() else {}
                if entry:
                    pairs.append((str(entry["prompt"]), str(entry.get("kind", "prompt"))))
            except (ValueError, KeyError, TypeError, AttributeError):
                problems.add(f'line {number}: {line[:60]!r}, expected a JSON object with "prompt"')
        problems.check(bool(pairs), "no prompts in it")
        problems.raise_as(DFlashError)
    for index, (text, _) in enumerate(pairs):
        if not text.strip():
            raise DFlashError(f"prompt {index}: is empty, expected text")
    return pairs


def encode(tokenizer: Any, text: str, raw: bool) -> list[int]:
    """Token ids of a user turn. Names of special tokens inside the text count as these tokens, as in transformers."""
    if raw or tokenizer.chat_template is None:
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
    )
    return list(chat["input_ids"])


def _check_lengths(prompts: list[_Prompt], max_tokens: int, max_seq_len: int) -> None:
    """Refuse prompts that do not fit before any of them runs."""
    problems = Problems("prompts")
    for index, prompt in enumerate(prompts):
        needed = len(prompt.token_ids) + max_tokens
        problems.check(
            needed <= max_seq_len,
            f"prompt {index} has {len(prompt.token_ids)} tokens and may get {max_tokens} more, {needed} in all, but the"
            f" engine was built with max_seq_len {max_seq_len}; lower --max_tokens or rebuild with --max_seq_len {needed}",
        )
    problems.raise_as(DFlashError)


def _console() -> Any:
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, markup=False)


def _by_kind(answers: list[_Answer]) -> dict[str, list[_Answer]]:
    kinds: dict[str, list[_Answer]] = defaultdict(list)
    for answer in answers:
        kinds[answer.prompt.kind].append(answer)
    return {**kinds, "all": answers} if len(kinds) > 1 else dict(kinds)


def _merged(answers: list[_Answer]) -> tuple[DecodeStatistics, DecodeStatistics | None]:
    """Statistics of the speculative and of the plain runs."""
    from ..runtime.statistics import DecodeStatistics

    plain = [answer.plain.statistics for answer in answers if answer.plain is not None]
    speculative = DecodeStatistics.merged(answer.speculative.statistics for answer in answers)
    return speculative, DecodeStatistics.merged(plain) if plain else None


def _report(answers: list[_Answer], tokenizer: Any) -> dict[str, Any]:
    groups = {}
    for kind, group in _by_kind(answers).items():
        speculative, plain = _merged(group)
        groups[kind] = {"speculative": speculative.to_json(), "plain": plain.to_json() if plain else None}
    return {
        "answers": [
            {
                "kind": answer.prompt.kind,
                "prompt": answer.prompt.text,
                "text": tokenizer.decode(answer.speculative.token_ids, skip_special_tokens=True),
                "token_ids": answer.speculative.token_ids,
                "finish_reason": answer.speculative.finish_reason,
                "difference": None if answer.difference is None else vars(answer.difference),
            }
            for answer in answers
        ],
        "statistics": groups,
        "identical": identity(answers) if all(answer.plain for answer in answers) else None,
    }


def identity(answers: list[_Answer]) -> str:
    """Whether the output is the target's own: yes; yes but for ties; or no, with where."""
    found = [(i, a.difference) for i, a in enumerate(answers) if a.difference is not None]
    if not found:
        return "yes"
    places = ", ".join(f"prompt {i} token {d.index} (top-2 logit gap {d.gap:.1e})" for i, d in found)
    verdict = "yes, but for numerical ties" if all(d.is_tie for _, d in found) else "NO"
    return f"{verdict}: {places}"


def _print_report(answers: list[_Answer], legend: str) -> None:
    rows, shares = [], []
    for kind, group in _by_kind(answers).items():
        speculative, plain = _merged(group)
        speed, base = speculative.tokens_per_second, plain.tokens_per_second if plain else None
        rows.append(
            (
                kind,
                len(group),
                speculative.new_tokens,
                _number(speculative.acceptance_length),
                _number(speed, 1),
                _number(base, 1),
                f"{speed / base:.2f}x" if speed and base else "-",
            )
        )
        shares.append((kind, *(f"{share:.3f}" for share in speculative.position_acceptance)))
    print_table(
        "Speculative against plain decoding",
        ("kind", "prompts", "new tokens", "acceptance length", "tokens/s", "plain tokens/s", "speed-up"),
        rows,
    )
    width = max(len(row) for row in shares)
    print_table(
        "Drafts accepted, by position",
        ("kind", *(str(position) for position in range(1, width))),
        [(*row, *("-",) * (width - len(row))) for row in shares],
    )
    total, _ = _merged(answers)
    steps = max(total.num_steps, 1)
    print_table(
        "Time of a step",
        ("phase", "ms"),
        [(name, f"{1000 * total.seconds[name] / steps:.2f}") for name in ("draft", "verify", "ingest", "own")],
    )
    print(legend)
    for reason, count in total.declines.items():
        print(f"steps with fewer drafts: {count} ({reason})")
    for alarm in total.alarms():
        print(f"warning: {alarm}")
    if all(answer.plain for answer in answers):
        print(f"identical to plain decoding: {identity(answers)}")


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
