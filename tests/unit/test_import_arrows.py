"""The import arrows of the package point one way, and each foreign library has its importers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "trtllm_dflash"

# From the bottom up; a module imports from its own row and from the rows before it.
LAYERS = (
    ("errors",),
    ("config", "__init__"),
    ("limits", "target_check", "reference", "heads"),
    ("io_spec",),  # above the heads: their rows say what the block model yields
    ("checkpoint",),
    ("graph",),
    ("engine",),
    ("overrides",),
    ("pipeline", "runtime"),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Who may import what is not ours: modules or whole folders. torch, numpy and the standard library are everybody's.
IMPORTERS = {
    "safetensors": ("checkpoint/reader.py", "engine/weight_file.py"),
    "onnx": ("graph", "runtime/torch_session.py"),
    "onnxruntime": ("runtime/ort_session.py",),
    "transformers": ("runtime/hf_target.py",),
    "rich": ("cli",),
    "tensorrt": (),
    "tensorrt_rtx": (),
    "tensorrt_llm": (),
}

MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def imports(module: str) -> tuple[set[str], set[str]]:
    """First names of what a module imports: from this package, and from others."""
    depth = module.count("/") + 1
    own, foreign = set(), set()
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.Import):
            foreign |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            foreign.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level == depth:  # from the package's root
            own |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return own, foreign


@pytest.mark.parametrize("module", MODULES)
def test_arrows_point_one_way(module: str) -> None:
    here = RANK[module.split("/")[0].removesuffix(".py")]
    for name in imports(module)[0]:
        assert RANK.get(name, 1) <= here, f"{module} imports {name}, which lies above it"


@pytest.mark.parametrize("module", MODULES)
def test_foreign_libraries_have_their_importers(module: str) -> None:
    for name in imports(module)[1] & set(IMPORTERS):
        assert module.startswith(IMPORTERS[name]), f"{module} imports {name}"
