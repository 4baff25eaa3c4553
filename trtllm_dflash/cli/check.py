"""``trtllm-dflash check``: does an engine compute what the reference does; is it of this checkpoint and target."""

from __future__ import annotations

import argparse

from ..errors import EngineMismatchError
from .arguments import PLACES, directory, given, seed
from .output import log, print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--engine_dir", type=directory, required=True, help="engine directory that build wrote")
    parser.add_argument("--checkpoint_dir", type=directory, help="checkpoint that the engine must have been made from")
    parser.add_argument("--target", type=given, help=f"target that the drafter must fit: {PLACES}")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the random input (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when the engine differs from the reference."""
    from ..checkpoint.parse import parse_checkpoint
    from ..engine.manifest import open_engine
    from ..runtime.hf_target import target_spec
    from ..runtime.open import open_session
    from ..runtime.self_check import NUM_STEPS, compare
    from ..target_check import check_target

    engine = open_engine(args.engine_dir)
    if args.checkpoint_dir is not None:
        found = parse_checkpoint(args.checkpoint_dir).files.sha256()
        if found != engine.drafter_sha256:
            raise EngineMismatchError(
                f"{engine.directory}: made from a drafter with hash {engine.drafter_sha256[:12]}..,"
                f" {args.checkpoint_dir} has {found[:12]}..; rebuild: trtllm-dflash build"
                f" --checkpoint_dir {args.checkpoint_dir} --output_dir {engine.directory}"
            )
    if args.target is not None:
        check_target(engine.config, target_spec(args.target))
    with log.status("comparing with the reference", spinner="dots"):
        results = compare(open_session(engine), open_session(engine, "reference"), seed=args.seed)
    same = all(result.ok for result in results)
    if args.json:
        print_json(
            {"engine_dir": str(engine.directory), "same": same, "steps": [{**vars(r), "ok": r.ok} for r in results]}
        )
    else:
        print_table(
            f"{engine.options.runtime} session against the reference",
            ("context rows", "positions", "relative error", "bound", "ids", "verdict"),
            [
                (
                    result.context_rows,
                    "contiguous" if result.first_gap is None else f"gap at {result.first_gap}",
                    f"{result.error:.1e}",
                    f"{result.bound:.0e}",
                    "equal" if result.ids_equal else "differ",
                    "ok" if result.ok else "DIFFERENT",
                )
                for result in results
            ],
        )
        if len(results) < NUM_STEPS:
            print(f"{len(results)} of {NUM_STEPS} steps fit the engine's sizes")
        print(f"same as the reference: {'yes' if same else 'NO'}")
    return 0 if same else 1
