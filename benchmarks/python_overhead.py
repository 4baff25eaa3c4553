"""Our own Python per decode step: everything that is neither the target's forward nor a model run of the session.

    python benchmarks/python_overhead.py

Decodes one long sequence with a tiny random target and a tiny drafter, so that many steps at many context lengths
are cheap; subtracts the time inside `HFTarget.model` and inside the session's three models.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.fakes import tiny_target
from tests.support.tiny import write_checkpoint
from trtllm_dflash.config import BuildOptions
from trtllm_dflash.pipeline import build_engine
from trtllm_dflash.runtime.decode import generate
from trtllm_dflash.runtime.open import open_session
from trtllm_dflash.runtime.session_proposer import SessionProposer

NEW_TOKENS = 4000
inside = 0.0  # seconds in compute since the last token


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        global inside
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            inside += time.perf_counter() - start

    return run


def main() -> None:
    global inside
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        options = BuildOptions(max_batch_size=1, max_seq_len=NEW_TOKENS + 100)
        engine = build_engine(write_checkpoint(Path(directory) / "checkpoint"), Path(directory) / "engine", options)
        session = open_session(engine)
    target = tiny_target(max_position_embeddings=NEW_TOKENS + 200)
    session.bind_target(target.embedding, target.lm_head)
    for name in ("_run_context", "_run_block", "_run_head"):
        setattr(session, name, timed(getattr(session, name)))
    target.model.forward = timed(target.model.forward)
    steps: list[tuple[int, float]] = []  # context length, our own seconds
    last = time.perf_counter()
    tokens = 0

    def on_token(token: int, drafted: bool) -> None:
        nonlocal last, tokens
        global inside
        tokens += 1
        if not drafted:  # the bonus token ends a step
            now = time.perf_counter()
            steps.append((tokens, now - last - inside))
            last, inside = now, 0.0

    proposer = SessionProposer(session)
    generate(target, proposer, [5, 6, 7], max_new_tokens=NEW_TOKENS, on_token=on_token)
    print("context length | our own Python per step, ms (median of the steps in the range)")
    for low in range(0, NEW_TOKENS, 1000):
        times = [1000 * seconds for tokens, seconds in steps if low <= tokens < low + 1000]
        print(f"{low:6}..{low + 999:<5} | {statistics.median(times):.2f}")


if __name__ == "__main__":
    main()
