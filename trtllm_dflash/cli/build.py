"""``trtllm-dflash build``: flags and help follow from the fields of ``BuildOptions``."""

from __future__ import annotations

import argparse
import dataclasses
import time
import typing
from typing import Any

from ..config import BuildOptions
from .arguments import PLACES, directory, given
from .output import log, print_json, print_table, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--checkpoint_dir", type=directory, required=True, help="Hugging Face drafter checkpoint")
    parser.add_argument("--output_dir", type=directory, required=True, help="engine directory to write or replace")
    parser.add_argument(
        "--target",
        metavar="TARGET",
        type=given,
        help=f"target that the drafter must fit: {PLACES}",
    )
    types = typing.get_type_hints(BuildOptions)
    for field in dataclasses.fields(BuildOptions):
        kind = types[field.name]
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else None
        default = "" if field.default is None else f" (default: {field.default})"
        parser.add_argument(
            f"--{field.name}", default=argparse.SUPPRESS, choices=choices, type=str if choices else int,
            help=field.metadata["help"] + default,
        )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Build, and print every resolved option with its origin, the memory arithmetic and the result."""
    from ..pipeline import plan_build, run_build

    chosen = {f.name: getattr(args, f.name) for f in dataclasses.fields(BuildOptions) if hasattr(args, f.name)}
    options = BuildOptions(**chosen)
    target = None
    if args.target is not None:
        from ..runtime.hf_target import target_spec

        target = target_spec(args.target)
    plan = plan_build(args.checkpoint_dir, args.output_dir, options, target=target)
    if not args.json:
        print_table("Options", ("option", "value", "from"), _resolved(options, plan.limits, chosen))
        print_table("Memory", ("what", "size"), [(what, size(amount)) for what, amount in plan.memory.items()])
    started = time.perf_counter()
    with log.status("building", spinner="dots") as status:
        engine = run_build(plan, progress=status.update)
    seconds = time.perf_counter() - started
    files = {path.name: path.stat().st_size for path in sorted(engine.directory.iterdir())}
    if args.json:
        print_json(
            {
                "engine_dir": str(engine.directory),
                "seconds": round(seconds, 3),
                "options": dataclasses.asdict(options),
                "limits": dataclasses.asdict(plan.limits),
                "memory_bytes": plan.memory,
                "files": files,
                "notes": list(plan.checkpoint.notes),
            }
        )
    else:
        print_table("Engine", ("file", "size"), [(name, size(amount)) for name, amount in files.items()])
        for note in plan.checkpoint.notes:
            log.print(f"note: {note}", markup=False)
        print(f"built {engine.directory} in {seconds:.1f} s")
    return 0


def _resolved(options: BuildOptions, limits: Any, chosen: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """Every option, its resolved value, and where the value comes from."""
    rows = []
    for field in dataclasses.fields(options):
        value = getattr(limits, field.name, getattr(options, field.name))
        resolved = field.default is None and value is not None
        origin = "flag" if field.name in chosen else "checkpoint" if resolved else "default"
        rows.append((field.name, "-" if value is None else value, origin))
    return rows
