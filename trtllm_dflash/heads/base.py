"""The table of draft head families: parsing, weights, graph outputs and drafting all follow from a row.

A new head is one file with its ``DraftHead`` and one line here.
"""

from __future__ import annotations

from ..config import Family
from .markov import MARKOV
from .rows import DraftHead
from .selector import SELECTOR
from .top1 import TOP1

__all__ = ["HEADS", "DraftHead"]

HEADS: dict[Family, DraftHead] = {head.family: head for head in (TOP1, SELECTOR, MARKOV)}
