"""A Hugging Face model as the target. The only module that imports transformers, and only when a target is loaded.

Works on transformers 5.17 to 5.24, which differ in the name of the cache argument.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import inspect
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import TargetSpec
from ..errors import DFlashError, EngineMismatchError, Problems, UnsupportedError
from .target import Target, TargetOutput, TargetSequence

INSTALL = "pip install 'trtllm-dflash[demo]'"
# Rollback forgets rows of a KV cache; a recurrent state (linear attention, Mamba) cannot forget.
CROPPABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


class HFTarget(Target):
    """A causal language model of transformers, in whatever dtype and on whatever device it is.

    Raises:
        UnsupportedError: no list of decoder blocks, a head with a bias, or layers that cannot be rolled back.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        config = model.config.get_text_config()
        name = model.config.name_or_path or model.config.model_type
        self.blocks = _decoder_blocks(model, config.num_hidden_layers)
        head, problems = model.get_output_embeddings(), Problems(f"target {name}")
        problems.check(self.blocks is not None, f"no list of {config.num_hidden_layers} decoder blocks to tap")
        problems.check(isinstance(head, nn.Module), "no lm_head; a causal language model is needed")
        problems.check(getattr(head, "bias", None) is None, "lm_head has a bias, drafters share a head without one")
        stuck = sorted(set(getattr(config, "layer_types", None) or ()) - CROPPABLE_LAYERS)
        problems.check(not stuck, f"layers of type {', '.join(stuck)} cannot be rolled back after a rejected draft")
        problems.raise_as(UnsupportedError)
        self.embedding: Tensor = model.get_input_embeddings().weight.detach()
        self.lm_head: Tensor = head.weight.detach()
        self.spec = TargetSpec(
            name=name,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            vocab_size=len(self.lm_head),
            embedding_rows=len(self.embedding),
        )
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, as the model's generation config has them."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        stop = () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
        if strange := [token for token in stop if not isinstance(token, int)]:
            raise DFlashError(
                f"target {self.spec.name}: eos_token_id of its generation config is {strange[0]!r}, expected token ids;"
                " mend generation_config.json"
            )
        return stop

    def new_sequence(self, tapped_layers: Sequence[int] = ()) -> TargetSequence:
        """See ``Target``. Raises EngineMismatchError for a block that the model does not have."""
        last = self.spec.num_layers - 1
        if beyond := [layer for layer in tapped_layers if not 0 <= layer <= last]:
            raise EngineMismatchError(f"target {self.spec.name}: taps of blocks {beyond} asked for, it has 0..{last}")
        return _HFSequence(self, tuple(tapped_layers))


class _HFSequence(TargetSequence):
    """One sequence in its own DynamicCache."""

    def __init__(self, target: HFTarget, taps: tuple[int, ...]) -> None:
        from transformers import DynamicCache

        self.length = 0
        self._target = target
        self._taps = taps
        self._cache = DynamicCache(config=target.model.config)
        if hasattr(self._cache, "activate_past_recording"):  # else layers that slide forget what a rollback needs
            self._cache.activate_past_recording()
        self._slides = any(getattr(layer, "is_sliding", False) for layer in self._cache.layers)
        self._recorded = 0  # rows of the last forward that may be forgotten; layers that slide can go back no further

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], *, last_only: bool = False) -> TargetOutput:
        if not token_ids:
            raise ValueError("0 tokens, a forward needs at least 1")
        if self._recorded and self._slides:
            self._cache.crop(0)  # down to the window: transformers 5.17 needs it between any two forwards
        target, num_rows = self._target, len(token_ids)
        inputs = torch.tensor([list(token_ids)], device=target.model.device)
        options = {target.cache_argument: self._cache, "use_cache": True, "logits_to_keep": int(last_only)}
        with self._tapping(num_rows) as features:
            logits: Tensor = target.model(inputs, **options).logits[0]
        self.length += num_rows
        self._recorded = num_rows
        return TargetOutput(logits, features)

    def rollback(self, num_rows: int) -> None:
        limit = self._recorded if self._slides else self.length
        if not 0 <= num_rows <= limit:
            raise ValueError(f"rollback of {num_rows} rows, {limit} of {self.length} can be forgotten")
        if self.length:
            self._cache.crop(-num_rows)
        self.length -= num_rows
        self._recorded = 0

    @contextlib.contextmanager
    def _tapping(self, num_rows: int) -> Iterator[Tensor | None]:
        """Features ``[n, K*Ht]``, filled by hooks while the model runs; None without taps.

        A hook copies at once, so that a model that adds to its residual stream in place cannot change a feature.
        """
        if not self._taps:
            yield None
            return
        target, width = self._target, self._target.spec.hidden_size
        features = torch.empty(num_rows, len(self._taps) * width, dtype=target.model.dtype, device=target.model.device)

        def tap(column: int) -> Any:
            def copy(module: nn.Module, inputs: Any, output: Any) -> None:
                hidden = output if isinstance(output, Tensor) else output[0]
                features[:, column * width : (column + 1) * width] = hidden[0]

            return copy

        handles = [target.blocks[layer].register_forward_hook(tap(k)) for k, layer in enumerate(self._taps)]
        try:
            yield features
        finally:
            for handle in handles:
                handle.remove()


def _decoder_blocks(model: Any, num_layers: int) -> Any:
    """The list of decoder blocks; None when the model has none of that length."""
    lists = (part for part in model.get_decoder().modules() if isinstance(part, nn.ModuleList))
    return next((part for part in lists if len(part) == num_layers), None)


def load_target(spec: str, dtype: torch.dtype = torch.float32) -> tuple[HFTarget, Any]:
    """Load a target and its tokenizer, quietly and without the network.

    ``spec`` is a Hugging Face directory, a ``.gguf`` file, or ``package:NAME`` for the one ``.gguf`` file inside an
    installed distribution, which is located and never imported.

    Raises:
        DFlashError: the place, a library or a weight is missing, or transformers cannot read what is there.
    """
    with _reading(spec) as place:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model, report = AutoModelForCausalLM.from_pretrained(**place, dtype=dtype, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(**place)
    problems = Problems(f"target {spec}", "get the whole model")
    for kind in ("missing_keys", "mismatched_keys"):  # transformers would fill these with random numbers
        names = sorted(map(str, report[kind]))
        problems.check(not names, f"{len(names)} {kind.replace('_', ' ')}: {', '.join(names[:6])}")
    problems.raise_as(DFlashError)
    return HFTarget(model, tokenizer), tokenizer


def target_spec(spec: str) -> TargetSpec:
    """What a drafter must know of a target, from its configuration alone; weights are not read.

    Raises:
        DFlashError: as ``load_target``.
    """
    with _reading(spec) as place:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(**place).get_text_config()
    return TargetSpec(
        name=spec,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        embedding_rows=config.vocab_size,
    )


@contextlib.contextmanager
def _reading(spec: str) -> Iterator[dict[str, Any]]:
    """Quiet, with the arguments that say where ``spec`` lies; whatever transformers raises becomes a DFlashError."""
    path = _resolve(spec)
    is_gguf = path.suffix == ".gguf"
    needed = ("transformers", "accelerate", "gguf") if is_gguf else ("transformers",)
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise DFlashError(f"target {spec}: {' and '.join(missing)} not installed, needed to read it; {INSTALL}")
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path),
        "local_files_only": True,
        "trust_remote_code": False,  # a model directory may bring Python code; it is never run, nor asked about
    }
    if is_gguf:
        place |= {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with _quiet():
        try:
            yield place
        except Exception as error:  # transformers raises whatever its readers raise
            reason = " ".join(str(error).split()) or "no reason given"
            raise DFlashError(
                f"target {spec}: transformers cannot load {path}: {type(error).__name__}: {reason}"
            ) from error


def _resolve(spec: str) -> Path:
    """The file or directory that a target specification names."""
    if spec.startswith("package:"):
        return _gguf_of_package(spec, spec.removeprefix("package:"))
    path = Path(spec)
    if (path.is_file() and path.suffix == ".gguf") or (path / "config.json").is_file():
        return path
    found = "a directory without config.json" if path.is_dir() else "another file" if path.exists() else "nothing"
    raise DFlashError(
        f"target {spec}: {found} there; expected a Hugging Face model directory, a .gguf file, or package:NAME"
    )


def _gguf_of_package(spec: str, name: str) -> Path:
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise DFlashError(f"target {spec}: no installed distribution {name!r}; pip install it first") from error
    files = [Path(str(distribution.locate_file(f))) for f in distribution.files or () if f.suffix == ".gguf"]
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise DFlashError(
            f"target {spec}: {len(files)} .gguf files ({names}), expected 1; name the file's path instead"
        )
    if not files[0].is_file():
        raise DFlashError(f"target {spec}: {files[0]} is listed and not there; reinstall the package")
    return files[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no warnings: standard output and error belong to the caller."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        from transformers.utils import logging

        before = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(before)
