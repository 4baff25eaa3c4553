"""Engine directories: written whole or not at all, and opened only when every stamp fits."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import SMALL, tiny_engine
from tests.support.tiny import write_checkpoint
from trtllm_dflash.config import BuildOptions, TargetSpec
from trtllm_dflash.engine.directory import new_directory
from trtllm_dflash.engine.manifest import open_engine
from trtllm_dflash.errors import BuildError, EngineMismatchError, UnsupportedError
from trtllm_dflash.pipeline import build_engine
from trtllm_dflash.runtime.open import open_session


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("pristine")).directory


@pytest.fixture
def engine(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "engine"))


def edit(engine: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads((engine / "config.json").read_text())
    change(values)
    (engine / "config.json").write_text(json.dumps(values))


def edit_and_redigest(engine: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """An edit by somebody who knows how the digest is made."""

    def both(values: dict[str, Any]) -> None:
        change(values)
        values["trtllm_dflash"].pop("digest", None)
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        values["trtllm_dflash"]["digest"] = digest

    edit(engine, both)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap_weights(engine: Path) -> None:
    other = tiny_engine(engine.parent / "other", seed=1).directory
    shutil.copy(other / "weights.safetensors", engine / "weights.safetensors")


def replace_by_link(engine: Path) -> None:
    weights = engine / "weights.safetensors"
    weights.rename(engine.parent / "elsewhere.safetensors")
    weights.symlink_to(engine.parent / "elsewhere.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no directory": (shutil.rmtree, "no such directory"),
    "a file": (lambda e: (shutil.rmtree(e), e.write_text("x")), "no such directory"),
    "empty directory": (lambda e: (shutil.rmtree(e), e.mkdir()), "no regular file config.json"),
    "no manifest": (lambda e: (e / "config.json").unlink(), "no regular file config.json"),
    "manifest is a directory": (
        lambda e: ((e / "config.json").unlink(), (e / "config.json").mkdir()),
        "no regular file config.json",
    ),
    "manifest is a link": (
        lambda e: ((e / "config.json").rename(e / "real"), (e / "config.json").symlink_to(e / "real")),
        "no regular file config.json",
    ),
    "manifest is empty": (lambda e: (e / "config.json").write_text(""), "not JSON"),
    "manifest is binary": (lambda e: (e / "config.json").write_bytes(b"\xff\xfe\x00"), "not JSON"),
    "manifest is cut": (
        lambda e: (e / "config.json").write_text((e / "config.json").read_text()[:500]),
        "not JSON",
    ),
    "manifest is a list": (lambda e: (e / "config.json").write_text("[]"), "no 'trtllm_dflash' section"),
    "a checkpoint's config": (
        lambda e: (e / "config.json").write_text('{"hidden_size": 64}'),
        "--checkpoint_dir takes",
    ),
    "manifest is huge": (lambda e: (e / "config.json").write_text(" " * (17 << 20)), "bytes, expected at most"),
    "version of the future": (lambda e: edit(e, lambda v: v.update(version=2)), "format version is 2"),
    "edited geometry": (lambda e: edit(e, lambda v: v["pretrained_config"].update(head_dim=8)), "was edited"),
    "edited limits": (lambda e: edit(e, lambda v: v["build_config"].update(max_seq_len=99999)), "was edited"),
    "edited digest": (lambda e: edit(e, lambda v: v["trtllm_dflash"].update(digest="0" * 64)), "was edited"),
    "digest removed": (lambda e: edit(e, lambda v: v["trtllm_dflash"].pop("digest")), "was edited"),
    "field removed": (
        lambda e: edit_and_redigest(e, lambda v: v["pretrained_config"].pop("head_dim")),
        "manifest is not of this version's form",
    ),
    "unknown field": (
        lambda e: edit_and_redigest(e, lambda v: v["pretrained_config"].update(extra=1)),
        "manifest is not of this version's form",
    ),
    "unknown option": (
        lambda e: edit_and_redigest(e, lambda v: v["build_config"].update(extra=1)),
        "manifest is not of this version's form",
    ),
    "files section removed": (
        lambda e: edit_and_redigest(e, lambda v: v["trtllm_dflash"].pop("files")),
        "manifest is not of this version's form",
    ),
    "file outside the directory": (
        lambda e: edit_and_redigest(
            e, lambda v: v["trtllm_dflash"]["files"].update({"../x": {"bytes": 1, "sha256": "0"}})
        ),
        "manifest is not of this version's form",
    ),
    "weights missing": (lambda e: (e / "weights.safetensors").unlink(), "weights.safetensors is missing"),
    "weights cut": (
        lambda e: os.truncate(e / "weights.safetensors", 1000),
        "weights.safetensors has 1000 bytes, the build wrote",
    ),
    "weights grown": (
        lambda e: (e / "weights.safetensors").open("ab").write(b"x"),
        "weights.safetensors has",
    ),
    "weights: one bit": (lambda e: flip_a_byte(e / "weights.safetensors"), "weights.safetensors has SHA-256"),
    "weights of another drafter": (swap_weights, "weights.safetensors has SHA-256"),
    "weights are a link": (replace_by_link, "weights.safetensors is a symbolic link"),
    "block missing": (lambda e: (e / "block.onnx").unlink(), "block.onnx is missing"),
    "context: one bit": (lambda e: flip_a_byte(e / "context.onnx"), "context.onnx has SHA-256"),
    "head of another model": (lambda e: shutil.copy(e / "block.onnx", e / "head.onnx"), "head.onnx has"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_directory_is_refused_in_one_message(case: str, engine: Path) -> None:
    damage, expected = BROKEN[case]
    damage(engine)
    with pytest.raises(EngineMismatchError) as caught:
        open_engine(engine)
    message = str(caught.value)
    assert expected in message
    assert str(engine) in message
    assert "rebuild: trtllm-dflash build" in message


def test_all_differences_come_in_one_message(engine: Path) -> None:
    (engine / "head.onnx").unlink()
    flip_a_byte(engine / "weights.safetensors")
    with pytest.raises(EngineMismatchError, match=r"(?s)head.onnx is missing.*weights.safetensors has SHA-256"):
        open_engine(engine)


def test_a_stray_file_does_no_harm(engine: Path) -> None:
    (engine / "notes.txt").write_text("mine")
    assert open_engine(engine).directory == engine


def test_open_engine_returns_what_was_built(engine: Path) -> None:
    opened = open_engine(engine)
    assert opened.rendering == "ort"
    assert opened.options == BuildOptions(**SMALL)
    assert opened.limits.max_draft_len == opened.config.max_draft_len == 7
    assert opened.target is None


def test_unknown_session_is_refused(engine: Path) -> None:
    with pytest.raises(UnsupportedError, match="session 'torch' was asked for, the engine is for 'onnxruntime'"):
        open_session(engine, "torch")


# --- writing ----------------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_half(output: Path) -> None:
    with new_directory(output) as directory:
        (directory / "half").write_text("x")
        raise ZeroDivisionError


def test_a_failing_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write_half(tmp_path / "out")
    assert names(tmp_path) == []


def test_a_failing_rebuild_leaves_the_old_engine(engine: Path) -> None:
    before = names(engine)
    with pytest.raises(ZeroDivisionError):
        write_half(engine)
    assert names(engine) == before
    assert names(engine.parent) == ["engine"]
    open_engine(engine)


def test_a_rebuild_replaces_the_whole_engine(engine: Path, tmp_path: Path) -> None:
    (engine / "stale").write_text("x")
    build_engine(write_checkpoint(tmp_path / "checkpoint", seed=5), engine, BuildOptions(**SMALL))
    assert "stale" not in names(engine)
    assert names(tmp_path) == ["checkpoint", "engine"]


@pytest.mark.parametrize("what", ["file", "link", "foreign directory"])
def test_what_is_not_ours_is_left_alone(what: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if what == "file":
        out.write_text("mine")
    elif what == "link":
        (tmp_path / "real").mkdir()
        out.symlink_to(tmp_path / "real")
    else:
        out.mkdir()
        (out / "thesis.tex").write_text("mine")
    before = names(tmp_path)
    with pytest.raises(BuildError, match="choose another --output_dir"):
        build_engine(write_checkpoint(tmp_path / "checkpoint"), out)
    assert names(tmp_path) == sorted([*before, "checkpoint"])


def test_leftovers_of_killed_builds_are_removed_and_running_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / ".out.dead").mkdir()
    with new_directory(tmp_path / "out") as running:
        with new_directory(tmp_path / "out"):
            assert running.exists()
        assert running.exists()
    assert names(tmp_path) == ["out"]


def test_an_old_engine_that_a_killed_build_set_aside_is_put_back(engine: Path, tmp_path: Path) -> None:
    """Killed between its two renames, a build has moved the old engine away and not put the new one there."""
    engine.rename(tmp_path / ".engine.abc.old")
    (tmp_path / ".engine.abc").mkdir()
    with pytest.raises(ZeroDivisionError):
        write_half(engine)
    assert names(tmp_path) == ["engine"]
    open_engine(engine)


def test_files_are_readable_by_others(engine: Path) -> None:
    assert {oct(path.stat().st_mode & 0o777) for path in engine.iterdir()} == {"0o644"}


@pytest.mark.parametrize("content", ['["trtllm_dflash"]', '"see trtllm_dflash"', '{"trtllm_dflash": 1}', "[" * 100000])
def test_a_config_that_only_mentions_us_is_not_an_engine(content: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(content)
    with pytest.raises(BuildError, match="choose another --output_dir"):
        write_half(tmp_path / "out")


@pytest.mark.parametrize("where", [".", "..", "inner/.."])
def test_the_current_directory_is_not_replaced(where: str, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (engine / "inner").mkdir()
    monkeypatch.chdir(engine / "inner" if where == ".." else engine)
    with pytest.raises(BuildError, match="current directory or above it"):
        write_half(Path(where))


def test_kill_at_random_moments_leaves_nothing_that_opens(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", num_layers=8, hidden_size=256, intermediate_size=2048)
    out = tmp_path / "out"
    code = (
        "import sys; from trtllm_dflash.pipeline import build_engine; print('ready', flush=True);"
        f"build_engine({str(checkpoint)!r}, {str(out)!r}); print('done', flush=True)"
    )
    finished = 0
    for attempt in range(6):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.03 * (attempt + 1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if out.exists():
            open_engine(out)  # raises unless complete
            finished += 1
            shutil.rmtree(out)
    build_engine(checkpoint, out)
    assert [name for name in names(tmp_path) if name.startswith(".")] == []
    assert finished < 6, "every kill came too late to test anything"


# --- options ----------------------------------------------------------------------------------------------------------

BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "block too wide": ({"max_draft_len": 8}, "max_draft_len is 8, but the drafter was trained for 7 drafts"),
    "no drafts": ({"max_draft_len": 0}, "max_draft_len is 0, expected 1 to"),
    "no batch": ({"max_batch_size": 0}, "max_batch_size is 0"),
    "negative sequence": ({"max_seq_len": -5}, "max_seq_len is -5"),
    "chunk below a block": ({"max_num_tokens": 7}, "max_num_tokens is 7, expected 8 to"),
    "a huge batch": ({"max_batch_size": 10**23}, "max_batch_size is 1"),
    "a pool past int32": ({"max_batch_size": 2**20, "max_seq_len": 2**20}, "context rows, expected at most 2147483647"),
    "empty pages": ({"tokens_per_block": 0}, "tokens_per_block is 0"),
    "bfloat16 on ONNX Runtime": ({"dtype": "bfloat16"}, "runtime onnxruntime computes in float32"),
    "unknown runtime": ({"runtime": "cuda"}, "runtime is 'cuda', expected one of"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    options, expected = BAD_OPTIONS[case]
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(BuildError, match=expected):
        build_engine(checkpoint, tmp_path / "out", BuildOptions(**options))
    assert names(tmp_path) == ["checkpoint"]


def test_T43_a_wrong_target_is_named_with_both_sizes(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    target = TargetSpec("wrong", hidden_size=128, num_layers=4, vocab_size=1000, embedding_rows=2)
    with pytest.raises(EngineMismatchError) as caught:
        build_engine(checkpoint, tmp_path / "out", target=target)
    message = str(caught.value)
    for part in ("128", "64", "1000", "160", "[4]", "mask_token_id is 3", "2 rows"):
        assert part in message
    assert names(tmp_path) == ["checkpoint"]
