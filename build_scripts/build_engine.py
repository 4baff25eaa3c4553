#!/usr/bin/env python3
"""Build an engine from a drafter checkpoint: `trtllm-dflash build` as a script, runnable from a source checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from trtllm_dflash.cli.main import main
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed; run this with the Python of an environment made by `make venv`")

if __name__ == "__main__":
    sys.exit(main(["build", *sys.argv[1:]]))
