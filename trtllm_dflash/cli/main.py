"""``trtllm-dflash``: one file a verb. Results on stdout, log on stderr; exit 0 good, 1 difference found, 2 cannot."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import DFlashError

DESCRIPTION = "DFlash speculative-decoding drafters: build engines, check them, generate text with them."
VERBS = {
    "build": "build an engine directory from a drafter checkpoint",
    "inspect": "show what a checkpoint or an engine directory holds",
    "check": "compare an engine with the reference, on random input",
    "generate": "generate text with a target and a drafter engine",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except DFlashError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trtllm-dflash", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"trtllm-dflash {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in VERBS.items():
        verb = verbs.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False,
        )  # fmt: skip
        module = importlib.import_module(f"{__package__}.{name}")
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
