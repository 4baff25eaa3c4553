"""TENSORS: our layout's names, the file's names for them, and their shapes; and matching a file against the table.

Dimensions are written in the letters of the spec, as sums of products: ``"nq*D+2*nkv*D H"``. Nothing in a file may be
left over and nothing may be missing; a head that is dropped silently costs all of its acceptance.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..config import Family
from ..heads.base import HEADS
from ..heads.rows import Facts, Part, TensorRow, row
from ..heads.values import Unread, Values
from .findings import Findings, listed

Shape = tuple[int, ...]

LETTERS: Mapping[str, str] = {
    "H": "hidden_size", "I": "intermediate_size", "L": "num_layers", "nq": "num_heads", "nkv": "num_kv_heads",
    "D": "head_dim", "K": "num_taps", "Ht": "target_hidden_size", "V": "vocab_size", "Vd": "draft_vocab_size",
}  # fmt: skip

_ATTENTION, _MLP = "layers.{i}.self_attn.", "layers.{i}.mlp."

# fmt: off
TENSORS: tuple[TensorRow, ...] = (
    row("fc", "H K*Ht", "fc.weight", "encoder.fc.weight"),
    row("hidden_norm", "H", "hidden_norm.weight", "encoder.output_norm_enc.weight"),
    row("norm", "H", "norm.weight"),
    row("input_norm", "H", "layers.{i}.input_layernorm.weight"),
    row("post_norm", "H", "layers.{i}.post_attention_layernorm.weight"),
    TensorRow("qkv", (Part("nq*D H", (_ATTENTION + "q_proj.weight",)),
                      Part("nkv*D H", (_ATTENTION + "k_proj.weight",)),
                      Part("nkv*D H", (_ATTENTION + "v_proj.weight",))), fused=(_ATTENTION + "qkv_proj.weight",)),
    row("q_norm", "D", _ATTENTION + "q_norm.weight"),
    row("k_norm", "D", _ATTENTION + "k_norm.weight"),
    row("o", "H nq*D", _ATTENTION + "o_proj.weight"),
    TensorRow("gate_up", (Part("I H", (_MLP + "gate_proj.weight",)), Part("I H", (_MLP + "up_proj.weight",))),
              fused=(_MLP + "gate_up_proj.weight",)),
    row("down", "H I", _MLP + "down_proj.weight"),
)
OPTIONAL: tuple[TensorRow, ...] = (
    row("embed_tokens", "V H", "embed_tokens.weight", when=lambda facts: bool(facts["owns_embedding"])),
    row("lm_head", "Vd H", "lm_head.weight", when=lambda facts: bool(facts["owns_lm_head"])),
    # The last one is a file of its own (mask_embedding.py).
    row("mask_embedding", "H", "mask_embedding", "mask_embedding.weight", "mask_embedding.pt",
        when=lambda facts: bool(facts["has_mask_embedding"])),
    TensorRow("d2t", (Part("Vd", ("d2t", "draft_id_to_target_id")),), integer=True,
              when=lambda facts: facts.get("has_d2t", False) or facts["draft_vocab_size"] < facts["vocab_size"]),
    # Checked against d2t while loading and not kept, hence in no layout.
    TensorRow("t2d", (Part("V", ("t2d",)),), integer=True, when=lambda facts: facts.get("has_t2d", False)),
)
# fmt: on
BACKBONE_PARAMETERS = "K*Ht*H + 2*H + L*2*nq*D*H + L*2*nkv*D*H + L*3*H*I + L*2*D + L*2*H"

# Facts that presence in the file decides.
PRESENCE = {
    "owns_embedding": "embed_tokens", "owns_lm_head": "lm_head", "has_mask_embedding": "mask_embedding",
    "has_d2t": "d2t", "has_t2d": "t2d",
}  # fmt: skip

_PREFIX = re.compile(r"^(model\.|logit_head\.)+")
_IGNORED = re.compile(r"(^|\.)rotary_emb\.|^verifier_(norm|lm_head)\.weight$")
_LAYER = re.compile(r"^layers\.(\d{1,6})\.")


@dataclass(frozen=True)
class FileTensors:
    """The tensors of a file under their canonical names: no prefix of the module that held them."""

    names: Mapping[str, str]  # canonical -> in the file
    shapes: Mapping[str, Shape]  # canonical -> shape
    ignored: tuple[str, ...]  # in the file; buffers and copies of the verifier

    def has(self, row_name: str) -> bool:
        """Whether an optional row has a tensor here."""
        return any(name in self.names for row in OPTIONAL if row.name == row_name for name in row.spellings)


def canonical_names(shapes: Mapping[str, Shape], findings: Findings) -> FileTensors:
    """Strip module prefixes; two tensors of one meaning are noted."""
    names: dict[str, str] = {}
    ignored = []
    for name in shapes:
        plain = _PREFIX.sub("", name)
        if _IGNORED.search(plain):
            ignored.append(name)
        elif plain in names:
            findings.add(f"{names[plain]} and {name} are the same tensor; expected one of them")
        else:
            names[plain] = name
    return FileTensors(names, {plain: shapes[name] for plain, name in names.items()}, tuple(ignored))


def rows_of(family: Family) -> tuple[TensorRow, ...]:
    """Every row that a family may have, in the order of the layout."""
    return TENSORS + HEADS[family].tensors + OPTIONAL


def sizes(facts: Facts, family: Family) -> dict[str, int]:
    """Letter -> size, for the letters whose value is known."""
    letters = {**LETTERS, **HEADS[family].letters}
    return {letter: facts[name] for letter, name in letters.items() if isinstance(facts.get(name), int)}


def evaluate(expression: str, letters: Mapping[str, int]) -> int:
    """A sum of products such as ``"2*c*H/cg + r"``. Raises KeyError for a letter without size."""

    def factor(text: str) -> int:
        dividend, _, divisor = text.strip().partition("/")
        number = int(dividend) if dividend.isdigit() else letters[dividend]
        return number // letters[divisor] if divisor else number

    return sum(math.prod(factor(text) for text in term.split("*")) for term in expression.split("+"))


def shape_of(dims: str, letters: Mapping[str, int]) -> Shape:
    """The shape that dimensions such as ``"H K*Ht"`` have. Raises KeyError for a letter without size."""
    return tuple(evaluate(dim, letters) for dim in dims.split())


Sources = Mapping[str, tuple[tuple[str, ...], ...]]
"""Row of our layout -> for each layer (one entry without layers) the file's tensors to concatenate."""


def match_tensors(
    family: Family, values: Values, file: FileTensors, explained: Iterable[str], findings: Findings
) -> Sources:
    """Find every tensor of the layout in the file; missing, left-over and misshapen ones are noted."""
    matcher = _Matcher(file, sizes(values, family), findings)
    layers = matcher.layers(values.get("num_layers"))
    sources = {}
    for row_ in rows_of(family):
        try:
            wanted = row_.when(values)
        except Unread:
            matcher.used.update(row_.spellings)
            continue
        if wanted:
            indices = layers if row_.per_layer else [None]
            sources[row_.name] = tuple(matcher.find(row_, index) for index in indices)
    matcher.report(set(explained))
    return sources


class _Matcher:
    """Looks rows up in one file and remembers what was used and what was missed."""

    def __init__(self, file: FileTensors, letters: Mapping[str, int], findings: Findings) -> None:
        self.file = file
        self.letters = letters
        self.findings = findings
        self.used: set[str] = set()
        self.missing: list[str] = []

    def layers(self, declared: int | None) -> list[int | None]:
        """Layers to look for. When the file has other layers than declared, that is the one problem to report."""
        found = sorted({int(m[1]) for name in self.file.names if (m := _LAYER.match(name))})
        if declared is None or found == list(range(declared)):
            return [*found]
        self.findings.add(
            f"num_hidden_layers is {declared}, but the file has tensors of {len(found)} layers "
            f"({listed(map(str, found)) or 'none'}); expected layers 0 to {declared - 1}"
        )
        return [*found]

    def find(self, row_: TensorRow, layer: int | None) -> tuple[str, ...]:
        """The file's names of a row in one layer; empty when a part is missing."""
        whole = self._present(row_.fused, layer)
        parts = [self._present(part.names, layer) for part in row_.parts]
        for name in filter(None, parts):
            if whole is not None:
                self.findings.add(f"{name} and {whole} hold the same weights; expected one of them")
        if whole is not None:
            self._check(whole, row_.dims)
            return (self.file.names[whole],)
        for part, present in zip(row_.parts, parts, strict=True):
            if present is None:
                self.missing.append(_named(part.names[0], layer))
            else:
                self._check(present, part.dims)
        return tuple(self.file.names[name] for name in parts if name is not None)

    def _present(self, spellings: Iterable[str], layer: int | None) -> str | None:
        present = [name for name in (_named(s, layer) for s in spellings) if name in self.file.names]
        self.used.update(present)
        for other in present[1:]:
            self.findings.add(f"{present[0]} and {other} are the same tensor; expected one of them")
        return present[0] if present else None

    def _check(self, name: str, dims: str) -> None:
        found, letters = self.file.shapes[name], f"[{', '.join(dims.split())}]"
        where = f"{self.file.names[name]} has shape {list(found)}"
        try:
            expected = shape_of(dims, self.letters)
        except KeyError:  # a size is unknown, which has been reported; the number of dimensions never is
            self.findings.check(len(found) == len(dims.split()), f"{where}, expected {letters}")
            return
        self.findings.check(found == expected, f"{where}, expected {letters} = {list(expected)}")

    def report(self, explained: set[str]) -> None:
        """Note what is missing and what nothing used."""
        if self.missing:
            self.findings.add(f"{len(self.missing)} tensors are missing: {listed(self.missing)}")
        left = [file for name, file in self.file.names.items() if name not in self.used and file not in explained]
        if left:
            self.findings.add(
                f"{len(left)} tensors have no use in this drafter: {listed(left)}; expected none left over"
            )


def _named(spelling: str, layer: int | None) -> str:
    return spelling if layer is None else spelling.replace("{i}", str(layer))


def parameter_count(family: Family, facts: Facts) -> int:
    """Parameters by formula, written down apart from the tensor table so that each checks the other."""
    own = {"owns_embedding": "V*H", "owns_lm_head": "Vd*H", "has_mask_embedding": "H"}
    terms = [BACKBONE_PARAMETERS, HEADS[family].parameters(facts)]
    terms += [formula for fact, formula in own.items() if facts[fact]]
    return evaluate(" + ".join(terms), sizes(facts, family))
