"""The rows that describe a drafter family: config fields, tensors, and the family itself.

These are the types only. ``heads/base.py`` holds the table of families, ``checkpoint/`` reads the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..config import DrafterConfig, Family
from .drafting import DraftRule
from .values import Convert, Values

REQUIRED: Final = object()  # a field without default

Facts = Mapping[str, Any]  # values by name: while parsing, or flattened from a finished DrafterConfig
Rule = Callable[[Values], Iterator[str]]  # yields problems; reads of unknown values end it


@dataclass(frozen=True)
class Field:
    """One fact of ``config.json``. Every spelling that is present must say the same; null counts as absent."""

    name: str
    convert: Convert
    spellings: tuple[str, ...]  # paths, "section.key"; the first is the one that messages recommend
    default: Any = REQUIRED  # a function is called with the values so far, and what it assumes is noted
    foreign: Mapping[str, Convert] = field(default_factory=dict)  # spellings with a meaning of their own
    noted: bool = True  # whether a computed default is worth telling

    @property
    def paths(self) -> dict[str, Convert]:
        """Every path with its converter."""
        return dict.fromkeys(self.spellings, self.convert) | dict(self.foreign)


@dataclass(frozen=True)
class Part:
    """One tensor of the file. ``dims`` names its dimensions in the letters of the spec, such as ``"nq*D H"``."""

    dims: str
    names: tuple[str, ...]  # accepted spellings; ``{i}`` is the layer


@dataclass(frozen=True)
class TensorRow:
    """One tensor of our layout: the parts of the file that make it up, concatenated along the first dimension."""

    name: str
    parts: tuple[Part, ...]
    fused: tuple[str, ...] = ()  # spellings under which a file holds all parts as one tensor
    when: Callable[[Facts], bool] = lambda facts: True
    integer: bool = False

    @property
    def per_layer(self) -> bool:
        """Whether the layout stacks one tensor of every layer."""
        return "{i}" in self.parts[0].names[0]

    @property
    def dims(self) -> str:
        """Dimensions of the whole, without the layer dimension."""
        first = "+".join(part.dims.split()[0] for part in self.parts)
        return " ".join([first, *self.parts[0].dims.split()[1:]])

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every file name that belongs to this row."""
        return self.fused + tuple(name for part in self.parts for name in part.names)


def row(name: str, dims: str, *names: str, when: Callable[[Facts], bool] = lambda facts: True) -> TensorRow:
    """A row that one tensor of the file makes up."""
    return TensorRow(name, (Part(dims, names),), when=when)


@dataclass(frozen=True)
class BlockOutput:
    """An output of the block model beside ``hidden``: a projection of the final hidden states, ``[S, B, width]``."""

    name: str  # also the field of DraftInputs that gets the rows that yield drafts
    weight: str  # tensor of our layout, [width, H]
    width: Callable[[DrafterConfig], int]


@dataclass(frozen=True)
class DraftHead:
    """One family of draft heads: what tells it apart, what it adds to config and tensors, and its drafting rule."""

    family: Family
    architectures: tuple[str, ...]
    default_block_size: int
    block: Callable[[Values], tuple[int, int]]  # (max_draft_len, first_draft_row); ValueError when contradictory
    draft: DraftRule
    outputs: tuple[BlockOutput, ...] = ()  # of the block model; ``hidden`` is always one
    tables: tuple[str, ...] = ()  # tensors of the layout that ``draft`` reads, where the drafter has them
    witness: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)  # keys that give the family away
    fields: tuple[Field, ...] = ()
    tensors: tuple[TensorRow, ...] = ()
    letters: Mapping[str, str] = field(default_factory=dict)  # letters in ``dims`` -> names of values
    rules: tuple[Rule, ...] = ()
    parts: Callable[[Values], dict[str, Any]] = lambda values: {}  # family parts of DrafterConfig
    parameters: Callable[[Facts], str] = lambda facts: "0"  # parameters beyond the backbone, in letters


def anchor_counted(values: Values) -> tuple[int, int]:
    """v1 and DFlash 2: ``block_size`` counts the anchor; row i predicts the token at N + i.

    Source: z-lab/dflash model.py, dflash_generate (drops row 0, drafts block_size - 1).
    """
    if values.get("sample_from_anchor"):
        raise ValueError(
            "sample_from_anchor (or shift_label) is true, but row 0 of this family yields no draft; "
            "remove the field, or use the DSpark architecture if the drafter is one"
        )
    drafts = values["block_size"] - 1
    if drafts < 1:
        raise ValueError("block_size is 1, which leaves no draft beside the anchor; expected at least 2")
    return drafts, 1
