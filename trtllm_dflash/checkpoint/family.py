"""Which family a checkpoint belongs to: architecture, configuration and tensors must tell the same story.

A drafter with extra heads loads as plain DFlash without an error and loses its acceptance, so two witnesses that
disagree are refused instead of outvoted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..config import Family
from ..heads.base import HEADS
from .fields import lookup, shown
from .findings import Findings, listed
from .variants import Explained

_PLACES = ("", "dflash_config.", "dspark_config.", "dspark_")


def detect_family(
    config: Mapping[str, Any], canonical: Iterable[str], explained: Explained, findings: Findings
) -> Family | None:
    """The family, or None when the witnesses disagree (noted) or a variant has been refused by name already."""
    told = _by_configuration(config)
    held = _by_tensors(canonical)
    named = _by_architecture(config, explained, findings)
    if named is None:
        return None
    stories: dict[Family, list[str]] = {named[0]: [f"architecture {named[1]}"]}
    # A DSpark drafter may have no head at all, and a missing head is reported by name; silence is no witness.
    for family, evidence in [*told.items(), *held.items()]:
        stories.setdefault(family, []).append(evidence)
    if not told and named[0] != "dflash":
        stories.setdefault("dflash", []).append(f"no configuration key of a {named[0]} head")
    if len(stories) == 1:
        return named[0]
    says = "; ".join(f"{family}: {', '.join(evidence)}" for family, evidence in stories.items())
    findings.add(f"the family is contradictory: {says}; expected one family in architecture, configuration and tensors")
    return None


def _by_architecture(config: Mapping[str, Any], explained: Explained, findings: Findings) -> tuple[Family, str] | None:
    architectures = config.get("architectures")
    known = {name: head.family for head in HEADS.values() for name in head.architectures}
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        findings.add(f"architectures is {shown(architectures)}, expected a list of one of {', '.join(known)}")
        return None
    name = architectures[0]
    if name in known:
        return known[name], name
    if name not in explained.architectures:
        findings.unsupported(f"architectures names {shown(name)}; implemented: {', '.join(known)}")
    return None


def _by_configuration(config: Mapping[str, Any]) -> dict[Family, str]:
    told: dict[Family, str] = {}
    for family, head in HEADS.items():
        paths = [(f"{place}{key}", matches) for key, matches in head.witness.items() for place in _PLACES]
        found = [(path, lookup(config, path), matches) for path, matches in paths]
        keys = [f"{path} {shown(value)}" for path, value, matches in found if value is not None and matches(value)]
        if keys:
            told[family] = listed(keys)
    return told


def _by_tensors(canonical: Iterable[str]) -> dict[Family, str]:
    """Families with tensors of their own in the file."""
    held: dict[Family, str] = {}
    present = set(canonical)
    for family, head in HEADS.items():
        own = {spelling.replace("layers.{i}.", "layers.0.") for row in head.tensors for spelling in row.spellings}
        if found := sorted(own & present):
            held[family] = f"tensors {listed(found)}"
    return held
