"""``trtllm-dflash generate``: text from a target and a drafter engine, streamed, then what the drafter was worth."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DFlashError, Problems
from .output import log, positive, print_json

if TYPE_CHECKING:
    from .report import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--engine_dir", type=Path, required=True, help="engine directory that build wrote")
    parser.add_argument("--target", required=True, help="model to accelerate: directory, .gguf file or package:NAME")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="a user turn; repeatable")
    source.add_argument("--prompts_file", type=Path, help='JSON lines with "prompt" and, for the table, "kind"')
    parser.add_argument("--max_tokens", type=positive, default=160, help="new tokens of a prompt, at most")
    parser.add_argument(
        "--max_draft_len", type=positive, help="drafts of a block, at most what the engine was built for"
    )
    parser.add_argument(
        "--draft_conf_tau",
        type=float,
        default=0.0,
        help="verify no draft from the first one on whose confidence is below this; needs a drafter with a confidence"
        " head; 0 verifies all",
    )
    parser.add_argument("--raw", action="store_true", help="take prompts as they are, without the chat template")
    parser.add_argument("--compare", action="store_true", help="decode plainly too, and compare text and speed")
    parser.add_argument("--session", choices=("reference",), help="run the oracle instead of the engine's session")
    parser.add_argument("--threads", type=positive, help="threads of the target and of the drafter")
    parser.add_argument("--num_prompts", type=positive, help="take only the first prompts of the file")
    parser.add_argument("--quiet", action="store_true", help="print the tables without the texts")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text and tables")


def run(args: argparse.Namespace) -> int:
    """Generate for every prompt; exit code 1 if ``--compare`` finds a difference that is not a numerical tie."""
    import torch
    from rich.console import Console

    from ..runtime.compare import first_difference
    from ..runtime.decode import generate
    from ..runtime.hf_target import load_target
    from ..runtime.open import open_session
    from ..runtime.session_proposer import SessionProposer
    from .report import Answer, Prompt, as_json, has_difference, print_report
    from .text_stream import TextStream

    if not args.draft_conf_tau <= 1.0:
        raise DFlashError(f"--draft_conf_tau: {args.draft_conf_tau}, expected a probability from 0 to 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    texts = read_prompts(args)
    with log.status("opening the engine and the target", spinner="dots"):
        session = open_session(args.engine_dir, args.session)
        target, tokenizer = load_target(args.target)
        proposer = SessionProposer(session, draft_conf_tau=args.draft_conf_tau)
        proposer.validate_against_target(target.spec)
        session.bind_target(target.embedding, target.lm_head)
    prompts = [Prompt(text, kind, encode(tokenizer, text, args.raw)) for text, kind in texts]
    _check_lengths(prompts, args.max_tokens, session.limits.max_seq_len)
    decoding = {"max_new_tokens": args.max_tokens, "stop_ids": target.stop_ids}
    console = Console(highlight=False, markup=False)
    answers = []
    for prompt in prompts:
        stream = None if args.json or args.quiet else TextStream(tokenizer, console, prompt)
        answer = Answer(
            prompt,
            generate(target, proposer, prompt.token_ids, num_drafts=args.max_draft_len, on_token=stream, **decoding),
        )
        if stream is not None:
            stream.close()
        if args.compare:
            answer.plain = generate(target, None, prompt.token_ids, **decoding)
            answer.difference = first_difference(
                target, prompt.token_ids, answer.speculative.token_ids, answer.plain.token_ids
            )
        answers.append(answer)
    if args.json:
        print_json(as_json(answers, tokenizer))
    else:
        print_report(answers)
    return int(has_difference(answers))


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
    pairs = pairs[: args.num_prompts]
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


def _check_lengths(prompts: list[Prompt], max_tokens: int, max_seq_len: int) -> None:
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
