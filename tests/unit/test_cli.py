"""The command line: exit codes, streams, JSON, and that flags follow from BuildOptions."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes import tiny_target
from tests.support.tiny import write_checkpoint
from trtllm_dflash.cli.main import main
from trtllm_dflash.cli.prompts import read_prompts
from trtllm_dflash.config import BuildOptions
from trtllm_dflash.errors import DFlashError
from trtllm_dflash.runtime import hf_target

ROOT = Path(__file__).parents[2]
FLAGS = ["--max_seq_len", "256", "--max_batch_size", "2", "--tokens_per_block", "16"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "checkpoint")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Path:
    out = checkpoint.parent / "engine"
    assert main(["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(out), *FLAGS]) == 0
    return out


class TinyTokenizer:
    """Words are token ids in decimal; the chat template puts id 1 in front."""

    chat_template = "tiny"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def apply_chat_template(self, chat: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, *self(chat[0]["content"])["input_ids"]]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f" {token}" for token in ids)


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--target tiny` loads a random model; everything behind it is real."""
    monkeypatch.setattr(hf_target, "load_target", lambda spec: (tiny_target(tokenizer=TinyTokenizer()), None))


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    code = main(argv)
    return code, json.loads(capsys.readouterr().out)


def test_every_build_option_is_a_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["build", "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(BuildOptions):
        assert f"--{field.name}" in text
        assert (field.default is None) or f"(default: {field.default})" in text


def test_build_prints_options_with_their_origin_and_the_memory(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e"), *FLAGS]) == 0
    lines = [line.split("│")[1:4] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    options = {name.strip(): (value.strip(), origin.strip()) for name, value, *rest in lines for origin in rest if rest}
    assert options["max_seq_len"] == ("256", "flag")
    assert options["max_draft_len"] == ("7", "checkpoint")
    assert options["max_num_tokens"] == ("2048", "default")


def test_build_json(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e"), *FLAGS, "--json")
    code, report = run_json(capsys, *arguments)
    assert code == 0
    assert report["limits"]["max_draft_len"] == 7
    assert set(report["files"]) == {"config.json", "weights.safetensors", "context.onnx", "block.onnx", "head.onnx"}
    pool = next(size for what, size in report["memory_bytes"].items() if what.startswith("context pool"))
    assert pool == 2 * 4 * 2 * 2 * 16 * (256 * 2 + 16)  # K and V, float32, layers, heads, head_dim, tokens + dummy page


def test_a_refusal_is_one_line_on_stderr_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--checkpoint_dir", str(tmp_path / "no"), "--output_dir", str(tmp_path / "e")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("CheckpointError: ")
    assert "Traceback" not in output.err


def test_a_bug_keeps_its_traceback_and_is_no_difference(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trtllm_dflash.checkpoint.parse.parse_checkpoint", lambda _: 1 / 0)
    assert main(["inspect", "--checkpoint_dir", str(checkpoint)]) == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_control_characters_in_a_message_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--checkpoint_dir", str(tmp_path / "a\x1b]0;b")]) == 2
    assert "a\\x1b]0;b" in capsys.readouterr().err


def test_a_path_too_long_for_the_system_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--engine_dir", "x" * 5000]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["inspect", "--engine_dir", ""],
        ["check", "--engine_dir", "e", "--target", " "],
        ["check", "--engine_dir", "e", "--seed", "-1"],
        ["check", "--engine_dir", "e", "--seed", "9" * 30],
        ["generate", "--engine_dir", "e", "--target", "t", "--prompt", "p", "--threads", "100000"],
        ["generate", "--engine_dir", "e", "--target", "t", "--prompt", "p", "--max_tokens", "0"],
        ["generate", "--engine_dir", "e", "--target", "t"],
        ["generate", "--engine_dir", "e", "--target", "t", "--prompt", "p", "--prompts_file", "f"],
        ["build", "--checkpoint_dir", "c", "--output_dir", "o", "--runtime", "cuda"],
        ["build", "--checkpoint_dir", "c", "--output_dir", "o", "--max_seq_len", "1.5"],
        ["build", "--checkpoint_dir", "c", "--output", "o"],
        ["unknown"],
        [],
    ],
)
def test_arguments_that_make_no_sense_end_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_a_reader_that_leaves_is_no_difference(engine: Path) -> None:
    """`trtllm-dflash inspect ... | head -1`: 2 or, where all fitted into the pipe, 0; never 1."""
    command = (
        f"{sys.executable} -m trtllm_dflash.cli.main inspect --engine_dir {engine} | true; exit ${{PIPESTATUS[0]}}"
    )
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True).returncode in (0, 2)


def test_a_small_engine_is_checked_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    sizes = ["--max_seq_len", "64", "--max_num_tokens", "16"]
    assert main(["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e"), *sizes]) == 0
    assert main(["check", "--engine_dir", str(tmp_path / "e")]) == 0
    assert "of 7 steps fit the engine's sizes" in capsys.readouterr().out


def test_an_output_inside_the_checkpoint_is_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out in (checkpoint, checkpoint / "engine"):
        assert main(["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(out)]) == 2
        assert "choose another --output_dir" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark"])
def test_inspect_reads_checkpoints_of_every_family(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_checkpoint(tmp_path / family, family)
    code, report = run_json(capsys, "inspect", "--checkpoint_dir", str(directory), "--json")
    assert code == 0
    assert report["drafter"]["family"] == family


def test_inspect_shows_an_engine(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_json(capsys, "inspect", "--engine_dir", str(engine), "--json")
    assert code == 0
    assert report["limits"]["max_seq_len"] == 256
    assert main(["inspect", "--engine_dir", str(engine)]) == 0


def test_check_agrees_with_the_reference(engine: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("check", "--engine_dir", str(engine), "--checkpoint_dir", str(checkpoint), "--json")
    code, report = run_json(capsys, *arguments)
    assert code == 0
    assert report["same"] is True
    assert len(report["steps"]) >= 6
    assert report["steps"][0]["context_rows"] == 0
    assert report["steps"][-1]["first_gap"] is not None


def test_check_finds_a_difference(
    engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One weight of one layer off by a few percent, as a wrong kernel would be."""
    from trtllm_dflash.runtime import open as opening

    read = opening.read_weights

    def disturbed(directory: Path) -> dict[str, Any]:
        weights = read(directory)
        weights["q_norm"] = weights["q_norm"] * 1.05
        return weights

    monkeypatch.setattr(opening, "read_weights", disturbed)
    assert main(["check", "--engine_dir", str(engine)]) == 1
    assert "same as the reference: NO" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["dflash2", "dspark"])
def test_every_family_builds_checks_and_generates(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hf_target, "load_target", lambda spec: (tiny_target(tokenizer=TinyTokenizer()), None))
    checkpoint, out = write_checkpoint(tmp_path / "checkpoint", family), str(tmp_path / "engine")
    code, built = run_json(capsys, "build", "--checkpoint_dir", str(checkpoint), "--output_dir", out, *FLAGS, "--json")
    assert code == 0
    assert built["memory_bytes"]["tables of the head in float32"] > 0
    assert run_json(capsys, "check", "--engine_dir", out, "--json")[0] == 0
    arguments = ("generate", "--engine_dir", out, "--target", "tiny", "--prompt", "5 6 7", "--max_tokens", "20")
    code, report = run_json(capsys, *arguments, "--compare", "--json")
    assert (code, report["identical"]) == (0, "yes")


def test_check_finds_a_difference_in_what_only_the_head_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trtllm_dflash.runtime import open as opening

    out, read = str(tmp_path / "engine"), opening.read_weights
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "dflash2")
    assert main(["build", "--checkpoint_dir", str(checkpoint), "--output_dir", out, *FLAGS]) == 0

    def disturbed(directory: Path) -> dict[str, Any]:
        weights = read(directory)
        return {**weights, "selector_projection": weights["selector_projection"] * 1.05}

    monkeypatch.setattr(opening, "read_weights", disturbed)
    assert main(["check", "--engine_dir", out]) == 1
    capsys.readouterr()


@pytest.mark.usefixtures("tiny_model")
def test_generate_cuts_unsure_drafts(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "engine")
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "dspark")
    assert main(["build", "--checkpoint_dir", str(checkpoint), "--output_dir", out, *FLAGS]) == 0
    capsys.readouterr()
    arguments = ("generate", "--target", "tiny", "--prompt", "5 6 7", "--max_tokens", "20", "--json")
    drafted = []
    for tau in ("0", "1.0"):
        code, report = run_json(capsys, *arguments, "--engine_dir", out, "--draft_conf_tau", tau)
        assert code == 0
        drafted.append(report["statistics"]["prompt"]["speculative"]["drafted"])
    assert drafted[0] > drafted[1] == 0
    assert main([*arguments, "--engine_dir", str(engine), "--draft_conf_tau", "0.5"]) == 2
    assert "has no confidence head" in capsys.readouterr().err
    assert main([*arguments, "--engine_dir", out, "--draft_conf_tau", "nan"]) == 2
    assert "expected a probability" in capsys.readouterr().err


def test_check_names_another_checkpoint(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_checkpoint(tmp_path / "other", seed=9)
    assert main(["check", "--engine_dir", str(engine), "--checkpoint_dir", str(other)]) == 2
    assert "rebuild: trtllm-dflash build" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny_model")
def test_generate_compares_with_plain_decoding(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("generate", "--engine_dir", str(engine), "--target", "tiny", "--prompt", "5 6 7", "--prompt", "8")
    code, report = run_json(capsys, *arguments, "--max_tokens", "20", "--compare", "--json")
    assert code == 0
    assert report["identical"] == "yes"
    for answer in report["answers"]:
        ended = {"stop": answer["token_ids"][-1] == 2, "length": len(answer["token_ids"]) == 20}
        assert ended[answer["finish_reason"]]
    assert report["statistics"]["prompt"]["speculative"]["steps"] > 0


@pytest.mark.usefixtures("tiny_model")
def test_generate_streams_text_with_accepted_drafts_in_brackets(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--engine_dir", str(engine), "--target", "tiny", "--prompt", "5 6", "--max_tokens", "64"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    stream = text.split("5 6\n\n", 1)[1].split("\n\n", 1)[0]
    assert stream.count("[") == stream.count("]")
    assert stream.replace("[", "").replace("]", "").split()  # words of TinyTokenizer, whatever the marks


@pytest.mark.usefixtures("tiny_model")
@pytest.mark.parametrize(
    ("prompt", "flags", "message"),
    [
        (" ", [], "prompt 0: is empty"),
        ("5 " * 250, [], "has 251 tokens and may get 160 more, 411 in all, but the engine's max_seq_len is 256"),
        ("5", ["--max_tokens", "500"], "build with --max_seq_len 502"),
        ("5", ["--max_draft_len", "8"], "--max_draft_len: 8, the engine was built for at most 7"),
    ],
)
def test_generate_refuses_what_does_not_fit(
    prompt: str, flags: list[str], message: str, engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--engine_dir", str(engine), "--target", "tiny", "--prompt", prompt, *flags]) == 2
    assert message in capsys.readouterr().err


def prompts_file(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    return path


BAD_LINES = (
    "not json", '{"text": "b"}', "[1]", "5", "null", "{}", '""', '{"prompt": null}', '{"prompt": 5}',
    '{"prompt": "a", "kind": null}', '{"prompt": "a", "kind": "all"}', "[" * 100000,
)  # fmt: skip


def test_prompts_file_names_every_bad_line(tmp_path: Path) -> None:
    file = prompts_file(tmp_path, '{"prompt": "a"}\n' + "\n".join(BAD_LINES))
    with pytest.raises(DFlashError) as caught:
        read_prompts(None, file)
    message = str(caught.value)
    assert f"{len(BAD_LINES)} problems" in message
    for number in range(2, len(BAD_LINES) + 2):
        assert f"line {number}:" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no prompts in it"),
        ("\n \n", "no prompts in it"),
        ('{"prompt": " "}', "prompt 0: is empty"),
        (r'{"prompt": "caf\ud83d"}', "is not Unicode text"),
    ],
)
def test_prompts_file_without_usable_text(content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DFlashError, match=message):
        read_prompts(None, prompts_file(tmp_path, content))


def test_prompts_file_that_is_no_text(tmp_path: Path) -> None:
    file = prompts_file(tmp_path, "")
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DFlashError, match="cannot be read as UTF-8"):
        read_prompts(None, file)
    with pytest.raises(DFlashError, match="not a regular file"):
        read_prompts(None, tmp_path)
    with pytest.raises(DFlashError, match="cannot be read"):
        read_prompts(None, tmp_path / "nowhere")


def test_prompts_file_gives_kinds(tmp_path: Path) -> None:
    """A byte-order mark, Windows line ends, empty lines and Unicode line separators inside a string are all legal."""
    file = prompts_file(tmp_path, '\ufeff{"prompt": "a", "kind": "x"}\r\n\n{"prompt": "b\u2028c"}\n')
    assert read_prompts(None, file) == [("a", "x"), ("b\u2028c", "prompt")]


def test_the_build_script_is_the_same_builder(checkpoint: Path, tmp_path: Path) -> None:
    script = ROOT / "build_scripts" / "build_engine.py"
    command = [sys.executable, str(script), "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e")]
    result = subprocess.run([*command, *FLAGS, "--json"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert json.loads(result.stdout)["engine_dir"] == str(tmp_path / "e")


def test_help_needs_no_heavy_import() -> None:
    code = "import sys; from trtllm_dflash.cli.main import _parser; _parser(); print(*sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "onnx", "onnxruntime", "transformers"} & set(modules)
