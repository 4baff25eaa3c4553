"""``trtllm-dflash``: one file a verb. Results on stdout, log on stderr.

Exit codes: 0 good, 1 difference found, 2 cannot, 70 a bug of this program, 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

from .. import __version__
from ..errors import DFlashError

# torch's OpenMP workers spin between two operations and, on a machine that has other work to do, keep each other from
# their cores: `benchmarks/busy_machine.py` shows what a single busy process then costs. A short spin loses nothing on
# an idle machine. It must be set before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

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
    before = signal.signal(signal.SIGTERM, _terminate)  # so that a build cleans up after itself
    try:
        code: int = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except DFlashError as error:
        return _refuse(f"{type(error).__name__}: {error}")
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except OSError as error:
        return _refuse(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception:
        traceback.print_exc()
        print("this is a bug of trtllm-dflash, please report it", file=sys.stderr)
        return 70
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


def _refuse(message: str) -> int:
    """Print a refusal. Names in it come from files, so control characters are shown, not sent to the terminal."""
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in message)
    print(shown.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trtllm-dflash", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"trtllm-dflash {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        module = importlib.import_module(f"{__package__}.{name}")
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
