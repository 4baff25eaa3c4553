"""Vectors worked by hand: small enough to check on paper, and shared by every runner of the operation."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_dflash.config import RopeConfig, YarnScaling

Row = tuple[float, ...]


@dataclass(frozen=True)
class ConvVector:
    """Grouped dynamic causal convolution; ``projection`` rows are ordered side, tap, group."""

    num_taps: int
    x: tuple[Row, ...]  # normalised rows, input of "pre" and of the projection
    y: tuple[Row, ...]  # sublayer output, input of "post"
    base: tuple[tuple[Row, ...], tuple[Row, ...]]  # [side][tap][channel]
    projection: tuple[Row, ...]
    pre: tuple[Row, ...]
    post: tuple[Row, ...]


@dataclass(frozen=True)
class SelectorVector:
    """Greedy candidate walk of DFlash 2; codebooks and projected rows have rank 2."""

    anchor: int
    candidates: tuple[tuple[int, ...], ...]  # [m][k]
    unary: tuple[Row, ...]  # [m][k]
    projected: tuple[Row, ...]  # [m][r]
    predecessor: dict[int, Row]
    successor: dict[int, Row]
    scores: tuple[Row, ...]
    drafts: tuple[int, ...]
    plain_argmax: tuple[int, ...]  # what ignoring the selector would draft


@dataclass(frozen=True)
class YarnVector:
    """Frequencies below dimension ``low`` are plain, from ``high`` on divided by the factor."""

    head_dim: int
    rope: RopeConfig
    low: int
    high: int
    frequencies: dict[int, float]
    magnitude: float


CONV = ConvVector(
    num_taps=2,
    x=((1, 2, 3, 4), (0.5, -1, 2, 0), (1, 1, -1, 2)),
    y=((1, 0, -1, 2), (2, 1, 0, 1), (0, 1, 1, -1)),
    base=(((1, 0.5, 1, 0.5), (0.25, 0, -0.25, 0.5)), ((1, 1, 1, 1), (0, 0.5, 0, -0.5))),
    projection=(
        (0.1, 0, 0, 0), (0, 0.1, 0, 0), (0, 0, 0.1, 0), (0, 0, 0, 0.1),
        (0, 0.2, 0, 0), (0.2, 0, 0, 0), (0, 0, 0, -0.1), (0, 0, -0.1, 0),
    ),
    pre=((1.1, 1.2, 3.6, 2.8), (0.975, -0.15, 1.05, 2.0), (1.175, 0.7, -1.2, 1.2)),
    post=((1.4, 0, -1.2, 2.4), (1.6, 0.8, 0.2, -0.3), (-0.4, 1.5, 1.2, -1.6)),
)  # fmt: skip

SELECTOR = SelectorVector(
    anchor=1,
    candidates=((7, 3, 5), (4, 6, 7)),
    unary=((3.0, 2.9, 1.0), (2.0, 1.9, 1.8)),
    projected=((1, 0.5), (0.5, 1)),
    predecessor={1: (1, 0), 3: (1, 1)},
    successor={7: (0.1, 0), 3: (0.4, 0.2), 5: (0, 0), 4: (0.2, 0.1), 6: (0.3, 0.9)},
    scores=((3.1, 3.3, 1.0), (2.2, 2.95, 1.85)),
    drafts=(3, 6),
    plain_argmax=(7, 4),
)

YARN = (
    YarnVector(
        head_dim=128,
        rope=RopeConfig(1e7, YarnScaling(factor=64.0, original_max_position_embeddings=4096)),
        low=11,
        high=26,
        frequencies={0: 1.0, 20: 2.6584061e-3, 63: 2.0099952e-9},
        magnitude=1.415888,
    ),
    YarnVector(
        head_dim=128,
        rope=RopeConfig(1e7, YarnScaling(factor=32.0, original_max_position_embeddings=8192)),
        low=14,
        high=29,
        frequencies={20: 3.9774625e-3, 63: 4.0199905e-9},
        magnitude=1.346574,
    ),
)
