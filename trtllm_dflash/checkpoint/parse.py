"""Checkpoint to ``DrafterConfig``: the fields, the rules and the tensor table put together.

``parse_headers`` is pure, from a configuration and tensor headers; ``parse_checkpoint`` reads a directory first. All
problems of a checkpoint come in one error: UnsupportedError when all of it is merely not implemented.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..config import DrafterConfig, DType, Family, RopeConfig
from ..heads.base import HEADS
from ..heads.values import Unread, Values
from . import mask_embedding
from .family import detect_family
from .fields import FIELDS, SECTIONS, SPECULATORS, read_fields, shown, unknown_keys
from .findings import Findings, listed
from .masks import layer_masks
from .names import (
    PRESENCE,
    TENSORS,
    FileTensors,
    Shape,
    Sources,
    canonical_names,
    match_tensors,
    parameter_count,
    rows_of,
)
from .quant import PLAIN_DTYPES, refuse_quantized
from .reader import CheckpointFiles, open_checkpoint
from .rules import RULES, check_rules
from .variants import Explained, refuse_variants

_DTYPES: dict[str, DType] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MAP_DTYPES = frozenset({"I64", "I32", "I16", "U8", "BOOL"})
_FC_NAMES = next(row.spellings for row in TENSORS if row.name == "fc")
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class Parsed:
    """What configuration and headers say."""

    config: DrafterConfig
    sources: Sources
    num_parameters: int
    payload_bytes: int  # of the floating-point tensors that are used
    notes: tuple[str, ...]  # assumptions made and tensors ignored


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory that a drafter can be made from."""

    config: DrafterConfig
    files: CheckpointFiles
    sources: Sources
    num_parameters: int
    notes: tuple[str, ...]


def parse_checkpoint(directory: str | Path) -> Checkpoint:
    """Open and resolve a checkpoint directory; tensor values are not read.

    Raises:
        CheckpointError: something is missing, wrong, contradictory or left over; all of it in one message.
        UnsupportedError: everything that stands in the way is understood, but not implemented.
    """
    files = open_checkpoint(directory)
    headers = {name: (header.dtype, header.shape) for name, header in files.headers.items()}
    parsed = parse_headers(
        files.config,
        headers,
        quantization=files.quantization,
        extras=files.extras,
        mask_embedding_id=None if files.mask_embedding is None else files.mask_embedding.mask_token_id,
        subject=str(files.directory),
    )
    return Checkpoint(parsed.config, files, parsed.sources, parsed.num_parameters, parsed.notes)


def parse_headers(
    config: Mapping[str, Any],
    headers: Mapping[str, tuple[str, Shape]],
    *,
    quantization: Mapping[str, Any] | None = None,
    extras: Iterable[str] = (),
    mask_embedding_id: int | None = None,
    subject: str = "checkpoint",
) -> Parsed:
    """Resolve ``config.json`` and the tensors' dtypes (as safetensors names them) and shapes.

    ``mask_embedding_id`` is what mask_embedding.pt says, whose embedding is among the headers under the file's name.
    Raises the errors of ``parse_checkpoint``; ``subject`` begins the message.
    """
    findings = Findings(subject)
    file = canonical_names({name: shape for name, (_, shape) in headers.items()}, findings)
    dtypes = {name: headers[name][0] for name in file.names.values()}
    explained = refuse_variants(config, [*headers, *extras], findings)
    quantized = refuse_quantized(config, quantization, dtypes, findings)
    family = detect_family(config, file.names, explained, findings)
    _check_sections(config, findings)

    presence = {fact: file.has(name) for fact, name in PRESENCE.items()}
    values = Values(tensors=file.shapes, mask_embedding_id=mask_embedding_id, **presence)
    table = FIELDS
    if family is not None:
        values["family"] = family
        table = FIELDS + HEADS[family].fields
    assumed = read_fields(config, table, values, findings)
    if family is None:
        findings.raise_all()
        raise AssertionError("a family that is not known has been refused")
    _refuse_unknown_keys(config, table, explained, findings)
    _derive(family, values, findings)
    check_rules(RULES + HEADS[family].rules, values, findings)
    dtype = _common_dtype(family, dtypes, file, quantized, findings)
    sources: Sources = {}
    if not quantized:
        sources = match_tensors(family, values, file, explained.tensors, findings)
    findings.raise_all()

    used = [name for parts in sources.values() for layer in parts for name in layer if dtypes[name] in PLAIN_DTYPES]
    counted = sum(math.prod(headers[name][1]) for name in used)
    _check_count(counted, parameter_count(family, values), findings)
    payload = counted * _ITEM_BYTES[dtype]
    size = f"{len(headers)} tensors, {counted} parameters, {payload} bytes of {dtype}"
    notes = (*assumed, *_remarks(config, dtype, file.ignored), size)
    return Parsed(_drafter(family, values, _DTYPES[dtype]), sources, counted, payload, notes)


def _remarks(config: Mapping[str, Any], dtype: str, ignored: Iterable[str]) -> Iterator[str]:
    said = config.get("dtype", config.get("torch_dtype"))
    if said is not None and said != _DTYPES[dtype]:
        yield f"config.json says dtype {shown(said)}, the tensors are {dtype}: the tensors decide"
    if ignored:
        yield f"ignored tensors: {listed(ignored)}"


def _check_sections(config: Mapping[str, Any], findings: Findings) -> None:
    for section in (*SECTIONS, SPECULATORS.rstrip(".")):
        content = config.get(section)
        if content is not None and not isinstance(content, Mapping):
            findings.add(f"{section} is {shown(content)}, expected an object")


def _refuse_unknown_keys(
    config: Mapping[str, Any], table: Iterable[Any], explained: Explained, findings: Findings
) -> None:
    if unknown := list(unknown_keys(config, table, explained.keys)):
        findings.unsupported(f"keys that nothing here reads: {listed(unknown)}; remove them if they change nothing")


def _derive(family: Family, values: Values, findings: Findings) -> None:
    """Values that follow from several others; one whose sources are unknown stays unknown."""
    matrices = [shape for name in _FC_NAMES if len(shape := values["tensors"].get(name, ())) == 2]
    if matrices:
        values["fc_width"] = matrices[0][1]
    with suppress(Unread):
        values["num_taps"] = len(values["target_layer_ids"])
        if values["fc_width"] % values["num_taps"] == 0:
            values["target_hidden_size"] = values["fc_width"] // values["num_taps"]
    with suppress(Unread):
        try:
            values["max_draft_len"], values["first_draft_row"] = HEADS[family].block(values)
        except ValueError as error:
            findings.add(str(error))
    with suppress(Unread):
        values["layer_masks"] = layer_masks(values, findings)


def _common_dtype(
    family: Family, dtypes: Mapping[str, str], file: FileTensors, quantized: frozenset[str], findings: Findings
) -> str:
    """The one dtype of all weights; vocabulary maps are integers and stand apart."""
    maps = {name for row in rows_of(family) if row.integer for name in row.spellings}
    by_dtype: dict[str, list[str]] = {}
    for plain, name in file.names.items():
        if plain in maps:
            findings.check(dtypes[name] in _MAP_DTYPES, f"{name} has dtype {dtypes[name]}, expected an integer type")
        elif name not in quantized and plain != mask_embedding.NAME:  # that one is rounded to the others' dtype
            by_dtype.setdefault(dtypes[name], []).append(name)
    kinds = "; ".join(f"{dtype}: {listed(names)}" for dtype, names in sorted(by_dtype.items()))
    if not quantized and len(by_dtype) > 1:
        findings.unsupported(f"tensors of several dtypes ({kinds}); implemented: all BF16, all F16 or all F32")
    elif not quantized and not set(by_dtype) <= PLAIN_DTYPES:
        findings.unsupported(f"tensors of dtype {kinds}; implemented: all BF16, all F16 or all F32")
    return next(iter(by_dtype), "F32")


def _check_count(counted: int, formula: int, findings: Findings) -> None:
    if counted != formula:
        findings.add(f"the tensors hold {counted} parameters, but the configuration makes {formula}")
    findings.raise_all()


def _drafter(family: Family, values: Values, dtype: DType) -> DrafterConfig:
    names = {field.name for field in fields(DrafterConfig)}
    given = {name: value for name, value in values.items() if name in names}
    rope = RopeConfig(theta=values["rope_theta"], yarn=values["yarn"])
    return DrafterConfig(**{**given, "rope": rope, "dtype": dtype, **HEADS[family].parts(values)})
