"""``trtllm-dflash generate``: text from a target and a drafter engine, streamed, then what the drafter was worth."""

from __future__ import annotations

import argparse
import io
from typing import TYPE_CHECKING

from ..errors import DFlashError
from .arguments import PLACES, directory, given, positive, threads
from .output import Output, log, print_json

if TYPE_CHECKING:
    from ..runtime.hf_target import HFTarget
    from ..runtime.session_proposer import SessionProposer
    from .report import Answer, Prompt


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
    from .prompts import check_lengths, encode, read_prompts
    from .report import Prompt, as_json, has_difference, print_report

    texts = read_prompts(args.prompt, args.prompts_file)[: args.num_prompts]
    with log.status("opening the engine and the target", spinner="dots"):
        target, proposer = _open(args)
    rows = len(target.embedding)
    prompts = [Prompt(text, kind, encode(target.tokenizer, text, args.raw, rows)) for text, kind in texts]
    check_lengths(prompts, args.max_tokens, proposer.session.limits.max_seq_len)
    answers = _answer(args, target, proposer, prompts)
    if args.json:
        print_json(as_json(answers, target.tokenizer))
    else:
        print_report(answers)
    return int(has_difference(answers))


def _open(args: argparse.Namespace) -> tuple[HFTarget, SessionProposer]:
    """The target, and a proposer bound to it."""
    import torch

    from ..runtime.hf_target import load_target
    from ..runtime.open import open_session
    from ..runtime.session_proposer import SessionProposer

    if not args.draft_conf_tau <= 1.0:
        raise DFlashError(f"--draft_conf_tau: {args.draft_conf_tau}, expected a probability from 0 to 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    session = open_session(args.engine_dir, args.session)
    if (limit := session.limits.max_draft_len) < (args.max_draft_len or 1):
        raise DFlashError(
            f"--max_draft_len: {args.max_draft_len}, the engine was built for at most {limit}; ask for fewer"
        )
    target, _ = load_target(args.target)
    proposer = SessionProposer(session, draft_conf_tau=args.draft_conf_tau)
    proposer.validate_against_target(target.spec)
    session.bind_target(target.embedding, target.lm_head)
    return target, proposer


def _answer(
    args: argparse.Namespace, target: HFTarget, proposer: SessionProposer, prompts: list[Prompt]
) -> list[Answer]:
    """Every prompt's text, streamed; with ``--compare`` the plain one too, put together the same way but not shown."""
    from ..runtime.compare import first_difference
    from ..runtime.decode import Generation, generate
    from .report import Answer
    from .text_stream import TextStream

    def decoded(prompt: Prompt, by: SessionProposer | None, output: Output, max_tokens: int) -> Generation:
        stream = None if args.json or args.quiet else TextStream(target.tokenizer, output, prompt)
        result = generate(
            target, by, prompt.token_ids, max_new_tokens=max_tokens, stop_ids=target.stop_ids,
            num_drafts=None if by is None else args.max_draft_len, on_token=stream,
        )  # fmt: skip
        if stream is not None:
            stream.close()
        return result

    shown, unseen = Output(), Output(file=io.StringIO())
    if args.compare:  # the first steps of a process are slow, whoever takes them
        for by in (proposer, None):
            decoded(prompts[0], by, unseen, min(8, args.max_tokens))
    answers = []
    for prompt in prompts:
        answer = Answer(prompt, decoded(prompt, proposer, shown, args.max_tokens))
        if args.compare:
            answer.plain = decoded(prompt, None, unseen, args.max_tokens)
            answer.difference = first_difference(
                target, prompt.token_ids, answer.speculative.token_ids, answer.plain.token_ids
            )
        answers.append(answer)
    return answers
