"""What every test starts from: no network, fixed seeds, one thread; the header says what this machine has."""

from __future__ import annotations

import os

# Read when the libraries are imported.
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line does, for machines with other work

import importlib.metadata
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

DISTRIBUTIONS = ("torch", "transformers", "onnx", "onnxruntime", "tensorrt", "tensorrt-rtx-cu13", "tensorrt-llm")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def pytest_report_header() -> str:
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "missing"
    return "capabilities: " + ", ".join([*(f"{name} {_version(name)}" for name in DISTRIBUTIONS), f"cuda {cuda}"])


def pytest_configure() -> None:
    torch.set_num_threads(1)  # tiny matrices only wait for a second thread, on a busy machine 20 times as long


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For tests whose work, or whose point, is large tensors."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
