"""Checkpoint directories: what is read, what the hash covers, and every way in which files do not fit together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.tiny import Tiny, write_checkpoint, write_files
from trtllm_dflash.checkpoint.parse import parse_checkpoint
from trtllm_dflash.checkpoint.reader import open_checkpoint
from trtllm_dflash.checkpoint.weights import load_weights
from trtllm_dflash.errors import CheckpointError, UnsupportedError

INDEX = "model.safetensors.index.json"


def write_shards(folder: Path) -> Path:
    """A tiny checkpoint in two shards with an index."""
    tensors = Tiny().tensors()
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[:12], "model-2.safetensors": names[12:]}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(Tiny().config()))
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in halves.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    """Change the weight map in place."""
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_headers_come_without_values_and_extras_are_listed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "README.md").write_text("a drafter")
    files = open_checkpoint(folder)
    expected = {name: (dtype, shape) for name, (dtype, shape) in Tiny().headers().items()}
    assert {name: (header.dtype, header.shape) for name, header in files.headers.items()} == expected
    assert files.extras == ("README.md",)
    assert torch.equal(files.tensor("fc.weight"), Tiny().tensors()["fc.weight"])


def test_shards_read_like_one_file(tmp_path: Path) -> None:
    sharded = load_weights(parse_checkpoint(write_shards(tmp_path / "shards")))
    whole = load_weights(parse_checkpoint(write_checkpoint(tmp_path / "whole")))
    assert sharded.keys() == whole.keys()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    real = write_checkpoint(tmp_path / "blobs")
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in real.iterdir():
        (linked / file.name).symlink_to(file)
    assert parse_checkpoint(linked).config == parse_checkpoint(real).config
    assert open_checkpoint(linked).sha256() == open_checkpoint(real).sha256()


def test_hash_covers_configuration_and_weights_only(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    first = open_checkpoint(folder).sha256()
    (folder / "README.md").write_text("more")
    assert open_checkpoint(folder).sha256() == first
    assert open_checkpoint(write_checkpoint(tmp_path / "b", seed=1)).sha256() != first
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"note": 1}))
    assert open_checkpoint(folder).sha256() != first


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "holds a list"),
        (b'"x"', "holds a str"),
        (b'{"block_size": 8, "block_size": 16}', "key given twice: block_size"),
        (b'{"a": {"x": 1, "x": 1}}', "key given twice: x"),
        (b'{"rms_norm_eps": NaN}', "NaN is not a JSON number"),
        (b'{"rms_norm_eps": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"rope_theta": 1e999}', "1e999 is too large"),
        (b'{"name": "\xff"}', "not valid JSON"),
        (b"[" * 200000, "nested too deeply"),
        (b'{"size": ' + b"1" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_bad_json_is_refused_naming_the_file(tmp_path: Path, content: bytes, words: str) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "config.json" in str(caught.value)
    assert words in str(caught.value)


def _truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def _both_sets(folder: Path) -> None:
    write_shards(folder)
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")


def _without(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _shards(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        write_shards(folder)
        change(folder)

    return apply


def _second_copy(folder: Path) -> None:
    tensors = Tiny().tensors()
    first = {name: tensors[name] for name in sorted(tensors)[11:]}
    save_file(first, folder / "model-2.safetensors")


def _dangling(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/gone")


def _folder_as_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


BROKEN_FILES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (_without("config.json"), ["config.json is missing"]),
    "no weights": (_without("model.safetensors"), ["model.safetensors is missing", "expected"]),
    "pickled weights": (_pickle_only, ["found pytorch_model.bin", "convert them to safetensors"]),
    "truncated": (_truncate, ["model.safetensors", "not a complete safetensors file", "bytes"]),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), ["not a complete safetensors file", "0 bytes"]),
    "html page": (lambda f: (f / "model.safetensors").write_text("<html>404</html>"), ["not a complete", "16 bytes"]),
    "dangling link": (_dangling, ["model.safetensors links to ../blobs/gone", "does not exist"]),
    "folder as weights": (_folder_as_weights, ["model.safetensors", "is not a file"]),
    "two sets": (lambda f: save_file({"x": torch.zeros(1)}, f / "copy.safetensors"), ["copy.safetensors beside"]),
    "shards without index": (_shards(lambda f: (f / INDEX).unlink()), ["found model-1.safetensors", INDEX]),
    "shard missing": (_shards(_without("model-2.safetensors")), ["model-2.safetensors, which is missing"]),
    "index and single file": (_shards(_both_sets), ["model.safetensors is not named in " + INDEX]),
    "tensor in two shards": (_shards(_second_copy), ["is in model-1.safetensors and in model-2.safetensors"]),
    "index names a ghost": (_shards(lambda f: edit_index(f, lambda m: m.update(ghost="model-1.safetensors"))),
                            ["names ghost in model-1.safetensors", "does not hold it"]),
    "index misplaces": (_shards(lambda f: edit_index(f, lambda m: m.update({"fc.weight": "model-2.safetensors"}))),
                        ["places fc.weight in model-2.safetensors, but it is in model-1.safetensors"]),
    "index forgets": (_shards(lambda f: edit_index(f, lambda m: m.pop("fc.weight"))),
                      ["model-1.safetensors holds fc.weight", "does not name"]),
    "index without map": (_shards(lambda f: (f / INDEX).write_text("{}")), [INDEX, "weight_map is missing"]),
    "index climbs out": (_shards(lambda f: edit_index(f, lambda m: m.update({"fc.weight": "../x.safetensors"}))),
                         ["../x.safetensors, which is missing"]),
    "bad quantization file": (lambda f: (f / "hf_quant_config.json").write_text("{"), ["hf_quant_config.json"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    change, words = BROKEN_FILES[name]
    folder = write_checkpoint(tmp_path)
    change(folder)
    with pytest.raises(CheckpointError) as caught:
        parse_checkpoint(folder)
    assert str(folder) in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    folder = write_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        open_checkpoint(folder / "config.json")


def test_quantization_file_beside_plain_tensors_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(UnsupportedError, match=r"format FP8.*hf_quant_config\.json"):
        parse_checkpoint(folder)


def test_copy_of_a_checkpoint_is_the_same_checkpoint(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", "dspark")
    copy = Path(shutil.copytree(folder, tmp_path / "b"))
    assert parse_checkpoint(copy).files.sha256() == parse_checkpoint(folder).files.sha256()


def test_tensor_values_are_not_read_while_parsing(tmp_path: Path) -> None:
    tiny = Tiny()
    tensors = tiny.tensors()
    tensors["fc.weight"].fill_(float("nan"))
    assert parse_checkpoint(write_files(tmp_path, tiny.config(), tensors)).config.family == "dflash"
