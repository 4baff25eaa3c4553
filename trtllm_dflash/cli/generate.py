"""``trtllm-dflash generate``: text from a target and a drafter engine, streamed, then what the drafter was worth."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DFlashError, Problems
from .arguments import PLACES, directory, given, positive, threads
from .output import Output, log, print_json

if TYPE_CHECKING:
    from .report import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--engine_dir", type=directory, required=True, help="engine directory that build wrote")
    parser.add_argument("--target", type=given, required=True, help=f"model to accelerate: {PLACES}")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="a user turn; repeatable")
    source.add_argument("--prompts_file", type=directory, help='JSON lines with "prompt" and, for the table, "kind"')
    parser.add_argument(
        "--max_tokens", type=positive, default=160, help="new tokens of a prompt, at most (default: 160)"
    )
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
    parser.add_argument("--threads", type=threads, help="threads of the target and of the drafter")
    parser.add_argument("--num_prompts", type=positive, help="take only the first prompts")
    parser.add_argument("--quiet", action="store_true", help="print the tables without the texts")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text and tables")


def run(args: argparse.Namespace) -> int:
    """Generate for every prompt; exit code 1 if ``--compare`` finds a difference that is not a numerical tie."""
    import io

    import torch

    from ..runtime.compare import first_difference
    from ..runtime.decode import Generation, generate
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
    rows = len(target.embedding)
    prompts = [Prompt(text, kind, encode(tokenizer, text, args.raw, rows)) for text, kind in texts]
    _check_lengths(prompts, args.max_tokens, session.limits.max_seq_len)
    decoding = {"max_new_tokens": args.max_tokens, "stop_ids": target.stop_ids}
    shown, unseen = Output(), Output(file=io.StringIO())
    if args.compare:  # the first steps of a process are slow, whoever takes them
        for warmed in (proposer, None):
            generate(target, warmed, prompts[0].token_ids, max_new_tokens=min(8, args.max_tokens))
    answers = []
    for prompt in prompts:

        def answered(by: SessionProposer | None, console: Output, prompt: Prompt = prompt) -> Generation:
            stream = None if args.json or args.quiet else TextStream(tokenizer, console, prompt)
            width = None if by is None else args.max_draft_len
            result = generate(target, by, prompt.token_ids, num_drafts=width, on_token=stream, **decoding)
            if stream is not None:
                stream.close()
            return result

        answer = Answer(prompt, answered(proposer, shown))
        if args.compare:  # its text is put together as well, so that both runs pay for that
            answer.plain = answered(None, unseen)
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
    pairs = [(text, "prompt") for text in args.prompt] if args.prompt else _prompts_of_file(args.prompts_file)
    pairs = pairs[: args.num_prompts]
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
            f" ({type(error).__name__}: {error}); try --raw"
        ) from error
    if ids and max(ids) >= vocabulary:
        raise DFlashError(
            f"prompt {text[:40]!r}: the tokenizer gives id {max(ids)}, the target's embedding has {vocabulary} rows;"
            " use the target's own tokenizer"
        )
    return ids


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
