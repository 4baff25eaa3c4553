"""Peak memory of `trtllm-dflash build`, for the example drafter and for one with the shapes of Qwen3.6-35B-A3B-DFlash.

    python benchmarks/build_memory.py

The second has random weights (948 MB). Prints peak resident set beside the promise: 2x the weights + 600 MB.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.tiny import write_checkpoint

ROOT = Path(__file__).resolve().parents[1]
QWEN_35B_A3B = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_layers": 8, "num_heads": 32, "num_kv_heads": 4,
    "head_dim": 128, "rope_theta": 1e7, "block_size": 16, "mask_token_id": 248070, "vocab_size": 248320,
    "target_layer_ids": (1, 10, 19, 28, 37), "num_target_layers": 40, "dtype": torch.bfloat16,
}  # fmt: skip
MB = 1_000_000


def build(checkpoint: Path, output: Path) -> tuple[float, int]:
    """Seconds and peak resident bytes of a build in a process of its own."""
    verb = ["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(output), "--json"]
    run = subprocess.run([sys.executable, "-m", "trtllm_dflash.cli.main", *verb], stdout=subprocess.PIPE, check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # of the largest child so far
    return json.loads(run.stdout)["seconds"], peak


def main() -> None:
    print("drafter | weights, MB | build, s | peak, MB | promised, MB")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        checkpoints = {"smollm2-135m-dflash-b8": ROOT / "examples" / "smollm2-135m-dflash-b8"}
        for name in (*checkpoints, "35B-A3B shapes"):
            checkpoint = checkpoints.get(name) or write_checkpoint(folder / "large", **QWEN_35B_A3B)
            weights = (checkpoint / "model.safetensors").stat().st_size
            seconds, peak = build(checkpoint, folder / f"engine-{weights}")
            print(f"{name} | {weights / MB:.0f} | {seconds:.1f} | {peak / MB:.0f} | {(2 * weights) / MB + 600:.0f}")


if __name__ == "__main__":
    main()
