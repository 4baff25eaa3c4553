"""Decoding beside one busy process, by how long torch's OpenMP workers spin between operations (GOMP_SPINCOUNT).

    python benchmarks/busy_machine.py

Eight rows through a small layer, over and over, on all cores, alone and beside a process that keeps one core busy.
Prints times relative to the default spin on the idle machine; the default takes a while beside the busy process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

ROUNDS = """
import os, time, torch
torch.set_num_threads(os.cpu_count())
x, w = torch.randn(8, 576), torch.randn(1536, 576)
for _ in range(20): torch.nn.functional.linear(x, w)
start = time.perf_counter()
for _ in range(200): torch.nn.functional.linear(x, w)
print(time.perf_counter() - start)
"""


def seconds(spin: str | None) -> float:
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    if spin is not None:
        environment["GOMP_SPINCOUNT"] = spin
    run = subprocess.run([sys.executable, "-c", ROUNDS], env=environment, capture_output=True, text=True, check=True)
    return float(run.stdout)


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    base = seconds(None)
    print("GOMP_SPINCOUNT | idle machine | beside a busy process")
    for spin in (None, "10000", "1000", "0"):
        alone = seconds(spin)
        with busy_process():
            beside = seconds(spin)
        print(f"{spin or 'default':14} | {alone / base:12.2f} | {beside / base:.1f}")


if __name__ == "__main__":
    main()
