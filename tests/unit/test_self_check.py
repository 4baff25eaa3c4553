"""`check` must not be fooled: by NaN, by zeros, by one output that nobody looks at."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines import SMALL, tiny_engine
from tests.support.tiny import write_checkpoint
from trtllm_dflash.config import BuildOptions
from trtllm_dflash.pipeline import build_engine
from trtllm_dflash.runtime.open import open_session
from trtllm_dflash.runtime.self_check import compare
from trtllm_dflash.runtime.session import Candidates


def nan_like(candidates: Candidates, what: str) -> Candidates:
    if what == "projected":
        return dataclasses.replace(candidates, outputs={what: candidates.outputs[what] * torch.nan})
    return dataclasses.replace(candidates, **{what: getattr(candidates, what) * torch.nan})


@pytest.mark.parametrize("what", ["values", "logsumexp", "projected"])
def test_nan_in_any_output_is_a_difference(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(tmp_path, family="dflash2")
    session, reference = open_session(engine), open_session(engine, "reference")
    assert all(result.ok for result in compare(session, reference))
    draft = session.draft
    monkeypatch.setattr(session, "draft", lambda *arguments: nan_like(draft(*arguments), what))
    assert not any(result.ok for result in compare(session, open_session(engine, "reference")))


@pytest.mark.parametrize(
    ("tiny", "tensor"),
    [
        ({"family": "dspark", "own_lm_head": True}, "lm_head.weight"),
        ({"family": "dflash2"}, "candidate_selector.hidden_projection.weight"),
    ],
)
def test_outputs_of_zeros_are_compared_too(tiny: dict[str, Any], tensor: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", **tiny)
    weights = load_file(checkpoint / "model.safetensors")
    weights[tensor] = torch.zeros_like(weights[tensor])
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    engine = build_engine(checkpoint, tmp_path / "engine", BuildOptions(**SMALL))
    assert all(result.ok for result in compare(open_session(engine), open_session(engine, "reference")))
