"""``mask_embedding.pt``: read as data, checked against the configuration, refused with both values otherwise."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny import Tiny, write_checkpoint
from trtllm_dflash.checkpoint.parse import parse_checkpoint
from trtllm_dflash.checkpoint.weights import load_weights
from trtllm_dflash.errors import CheckpointError

ROW = torch.randn(64, generator=torch.Generator().manual_seed(1))


def checkpoint_with(folder: Path, content: Any, **tiny: Any) -> Path:
    checkpoint = write_checkpoint(folder, **tiny)
    torch.save(content, checkpoint / "mask_embedding.pt")
    return checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_row_comes_in_the_type_of_the_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = parse_checkpoint(checkpoint_with(tmp_path, {"embedding": ROW, "mask_token_id": 3}, dtype=dtype))
    assert checkpoint.config.has_mask_embedding
    assert checkpoint.config.dtype == str(dtype).removeprefix("torch.")
    assert torch.equal(load_weights(checkpoint)["mask_embedding"], ROW.to(dtype))


def test_the_file_is_part_of_the_checkpoints_hash(tmp_path: Path) -> None:
    hashes = set()
    for row in (ROW, 2 * ROW):
        checkpoint = checkpoint_with(tmp_path, {"embedding": row, "mask_token_id": 3})
        hashes.add(parse_checkpoint(checkpoint).files.sha256())
    assert len(hashes) == 2


class Payload:
    """What an attacker would pickle: loading it would create a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_pickled_code_is_refused_and_not_run(tmp_path: Path) -> None:
    bait = tmp_path / "bait"
    checkpoint = checkpoint_with(tmp_path / "c", {"embedding": ROW, "mask_token_id": 3, "x": Payload(bait)})
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt: expected .* holds code or damage"):
        parse_checkpoint(checkpoint)
    assert not bait.exists()
    torch.load(checkpoint / "mask_embedding.pt", weights_only=False)
    assert bait.exists(), "the payload works, where it is let"


BROKEN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "shape": ({"embedding": ROW[:63], "mask_token_id": 3}, {},
              r"mask_embedding\.pt has shape \[63\], expected \[H\] = \[64\]"),
    "two rows": ({"embedding": ROW[None], "mask_token_id": 3}, {}, r"has shape \[1, 64\], expected \[H\] = \[64\]"),
    "id": ({"embedding": ROW, "mask_token_id": 4}, {}, "of mask_token_id 4, but config.json says mask_token_id 3"),
    "id is text": ({"embedding": ROW, "mask_token_id": "3"}, {}, "mask_token_id is '3', expected an integer"),
    "no id": ({"embedding": ROW}, {}, "found 'embedding'"),
    "more": ({"embedding": ROW, "mask_token_id": 3, "scale": 2.0}, {}, "'scale'"),
    "bare tensor": (ROW, {}, "found a Tensor"),
    "integers": ({"embedding": ROW.long(), "mask_token_id": 3}, {},
                 r"embedding is torch\.int64, expected a tensor of BF16"),
    "twice": ({"embedding": ROW, "mask_token_id": 3}, {"mask_embedding": True},
              r"mask_embedding and mask_embedding\.pt are the same tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_fit_is_refused_with_both_values(case: str, tmp_path: Path) -> None:
    content, tiny, message = BROKEN[case]
    with pytest.raises(CheckpointError, match=message):
        parse_checkpoint(checkpoint_with(tmp_path, content, **tiny))


def test_values_that_are_not_finite_are_refused_while_loading(tmp_path: Path) -> None:
    checkpoint = parse_checkpoint(checkpoint_with(tmp_path, {"embedding": ROW * torch.inf, "mask_token_id": 3}))
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt is -?inf at \[0\]"):
        load_weights(checkpoint)


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04 half an archive"])
def test_a_damaged_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / "mask_embedding.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt: expected a dictionary"):
        parse_checkpoint(checkpoint)


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    with (checkpoint / "mask_embedding.pt").open("wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(CheckpointError, match="has 68157440 bytes, at most 67108864 are read"):
        parse_checkpoint(checkpoint)


def test_other_files_beside_the_weights_change_nothing(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / "tokenizer.pt").write_bytes(b"x")
    assert parse_checkpoint(checkpoint).config.has_mask_embedding is Tiny().mask_embedding


def test_a_row_that_overflows_the_type_of_the_weights_is_refused(tmp_path: Path) -> None:
    checkpoint = parse_checkpoint(
        checkpoint_with(tmp_path, {"embedding": ROW * 1e6, "mask_token_id": 3}, dtype=torch.float16)
    )
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt is -?inf at"):
        load_weights(checkpoint)


KINDS = {
    "sparse": lambda: ROW.to_sparse(),
    "without values": lambda: torch.empty(64, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([ROW]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_an_unusual_kind_is_refused(kind: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_with(tmp_path, {"embedding": KINDS[kind](), "mask_token_id": 3})
    with pytest.raises(CheckpointError, match="expected a plain tensor"):
        parse_checkpoint(checkpoint)


def test_an_archive_that_unpacks_to_far_too_much_is_not_read(tmp_path: Path) -> None:
    checkpoint = checkpoint_with(tmp_path, {"embedding": torch.zeros(2**25), "mask_token_id": 3})
    path = checkpoint / "mask_embedding.pt"
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    assert path.stat().st_size < 2**20
    with pytest.raises(CheckpointError, match="bytes, at most 67108864 are read"):
        parse_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "content", [{str(i): 0 for i in range(100_000)}, {"embedding": ROW, "mask_token_id": "x" * 2**20}]
)
def test_messages_stay_short(content: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_checkpoint(checkpoint_with(tmp_path, content))
    assert len(str(caught.value)) < 1000
