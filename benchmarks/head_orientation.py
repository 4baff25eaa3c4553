"""Which side of the head's product the vocabulary should be on, on ONNX Runtime: hidden @ W^T or (W @ hidden^T)^T.

    python benchmarks/head_orientation.py

Checks that both give the same logits, then prints the ratio of their times (median of 25 runs, two threads) by rows.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime

VOCAB, HIDDEN = 49152, 576
BODIES = {
    "hidden @ W^T": "wt = Transpose <perm = [1, 0]> (w) y = MatMul (x, wt)",
    "(W @ hidden^T)^T": "xt = Transpose <perm = [1, 0]> (x) z = MatMul (w, xt) y = Transpose <perm = [1, 0]> (z)",
}


def session(body: str) -> Any:
    text = (
        f'<ir_version: 10, opset_import: ["": 23]> g (float[R, {HIDDEN}] x, float[{VOCAB}, {HIDDEN}] w)'
        f" => (float[R, {VOCAB}] y) {{ {body} }}"
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    model = onnx.parser.parse_model(text).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def median_seconds(run: Any) -> float:
    times = []
    for _ in range(25):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    weight = np.random.default_rng(0).standard_normal((VOCAB, HIDDEN), np.float32)
    sessions = {name: session(body) for name, body in BODIES.items()}
    print("rows | time of (W @ hidden^T)^T over time of hidden @ W^T")
    for rows in (1, 7, 16, 56):
        feeds = {"x": np.random.default_rng(1).standard_normal((rows, HIDDEN), np.float32), "w": weight}
        first, second = (s.run(None, feeds)[0] for s in sessions.values())
        np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-3)
        plain, swapped = (median_seconds(lambda s=s, feeds=feeds: s.run(None, feeds)) for s in sessions.values())
        print(f"{rows:4} | {swapped / plain:.2f}")


if __name__ == "__main__":
    main()
