"""How close two results must be: one table, and the two comparisons that print where and by how much they differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Bounds of one runner; both must hold.

    ``scalar`` bounds ``|x - y|^2 / (|x|^2 + |y|^2)``, which is 1 - 2<x,y>/(<x,x>+<y,y>): about half the squared
    relative error of the whole tensor. An element may differ by ``absolute + relative * max|expected|``.
    """

    scalar: float
    relative: float = 0.0
    absolute: float = 0.0


# Measured on two tiny layers, scalar and element. The authors' fp32 code: 9e-14 and 2e-6 (v1), 1.3e-12 and 9e-6 (v2).
# Their bf16 code against the fp32 reference on the same bf16 operands: 9e-5 and 0.018 (v1), 1e-3 and 0.053 (v2).
TOLERANCES: dict[tuple[str, str], Tolerance] = {
    # runner and type              whole tensor  one element
    ("ort", "fp32"):               Tolerance(1e-11, relative=1e-5),
    ("torch", "fp32"):             Tolerance(1e-11, relative=1e-5),
    ("torch", "bf16"):             Tolerance(1e-5, relative=2.0**-6),  # one op
    ("torch", "bf16 model"):       Tolerance(2e-4, relative=2.0**-5),  # a whole block: every op rounds, errors add up
    ("torch", "bf16 model dflash2"): Tolerance(2e-3, relative=2.0**-3),  # convolutions multiply rounded coefficients
    ("authors", "dflash"):         Tolerance(1e-12, absolute=2e-5),
    ("authors", "dflash2"):        Tolerance(1e-11, absolute=5e-5),
}  # fmt: skip


def assert_close(actual: Tensor, expected: Tensor, row: tuple[str, str]) -> None:
    """Fail unless ``actual`` is within ``TOLERANCES[row]`` of ``expected``, naming the worst coordinate.

    Shapes must be equal; dtypes may differ. NaN on either side fails; infinities must stand at the same places.
    """
    tolerance = TOLERANCES[row]
    assert actual.shape == expected.shape, f"{row}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    x, y = actual.detach().double().cpu(), expected.detach().double().cpu()
    same_infinity = x.isinf() & (x == y)
    error = torch.where(same_infinity, 0.0, (x - y).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    finite_y = torch.where(y.isfinite(), y, 0.0)
    bound = tolerance.absolute + tolerance.relative * float(finite_y.abs().max())
    worst = _coordinate(error)
    where = f"{row}: worst at {worst}: {float(x[worst]):.9g}, expected {float(y[worst]):.9g}"
    assert float(error[worst]) <= bound, f"{where}; difference {float(error[worst]):.3g}, allowed {bound:.3g}"
    finite_x = torch.where(x.isfinite(), x, 0.0)
    size = float(finite_x.square().sum() + finite_y.square().sum())
    scalar = float(error.square().sum()) / size if size else 0.0
    assert scalar <= tolerance.scalar, f"{where}; scalar difference {scalar:.3g}, allowed {tolerance.scalar:.3g}"


def assert_ids_equal(actual: Tensor, expected: Tensor, values: Tensor | None = None, bound: float = 0.0) -> None:
    """Fail unless the ids are equal, naming the first coordinate that differs and both ids.

    ``values`` are the oracle's values of ``expected`` (best first in the last dimension), printed beside the ids.
    With ``bound``, the runner's element bound, an id may stand in another's slot when the oracle's gap between the two
    is at most ``2 * bound``; an id outside the oracle's list counts with the last value of the list, its upper limit.
    """
    assert actual.shape == expected.shape, f"ids: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    for where in (actual.cpu() != expected.cpu()).nonzero().tolist():
        here = tuple(where)
        found, wanted = int(actual[here]), int(expected[here])
        message = f"ids: at {here}: {found}, expected {wanted}"
        if values is None:
            raise AssertionError(message)
        row_ids, row_values = expected[here[:-1]].tolist(), values[here[:-1]].tolist()
        gap = abs(row_values[here[-1]] - row_values[row_ids.index(found) if found in row_ids else -1])
        assert gap <= 2 * bound, f"{message}; oracle's gap {gap:.3g}, excused up to {2 * bound:.3g}; row {row_values}"


def _coordinate(error: Tensor) -> tuple[int, ...]:
    """Index of the largest element."""
    return tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
