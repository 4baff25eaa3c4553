"""Engine directory -> session: which session serves which rendering, as a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.weights import sidecar_names
from ..engine.manifest import Engine, open_engine
from ..engine.weight_file import read_sidecars, read_weights
from ..errors import UnsupportedError
from .ort_session import OrtSession
from .reference_session import ReferenceSession
from .session import Session
from .torch_session import TorchSession

Opener = Callable[[Engine], Session]


def _ort(engine: Engine) -> Session:
    return OrtSession(engine.config, engine.limits, engine.directory, _sidecars(engine))


def _torch(engine: Engine) -> Session:
    dtype = getattr(torch, engine.options.dtype)
    return TorchSession(engine.config, engine.limits, engine.directory, _sidecars(engine), dtype, torch.device("cpu"))


def _reference(engine: Engine) -> Session:
    return ReferenceSession(engine.config, engine.limits, {**read_weights(engine.directory), **_sidecars(engine)})


def _sidecars(engine: Engine) -> dict[str, Tensor]:
    return read_sidecars(engine.directory, sidecar_names(engine.config))


# The key is BuildOptions.runtime; the reference runs from the weight file of any engine.
SESSIONS: dict[str, Opener] = {"onnxruntime": _ort, "torch": _torch, "reference": _reference}


def open_session(engine: Engine | Path | str, session: str | None = None) -> Session:
    """The session that an engine is for; ``session="reference"`` runs its weights on the oracle instead.

    Raises:
        EngineMismatchError: the directory is not a sound engine.
        UnsupportedError: no such session, or the engine holds no models for it.
    """
    if not isinstance(engine, Engine):
        engine = open_engine(engine)
    runtime = engine.options.runtime
    chosen = session or runtime
    if chosen not in (runtime, "reference") or chosen not in SESSIONS:
        raise UnsupportedError(
            f"{engine.directory}: session {chosen!r} was asked for, the engine is for {runtime!r}"
            " (or 'reference'); rebuild with another --runtime"
        )
    return SESSIONS[chosen](engine)
