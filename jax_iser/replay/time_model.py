"""Modelled layer time: a line `a + b R` that the user gives or that fits measured points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np


class TimeFit(NamedTuple):
    """`a + b R` microseconds at imbalance R."""

    a: float
    b: float

    def __call__(self, imbalance: float) -> float:
        return self.a + self.b * imbalance


def parse_fit(text: str) -> TimeFit:
    """From `A,B`.

    Example:
      >>> parse_fit("513,1051")(1.44)
      2026.44
    """
    parts = text.split(",")
    try:
        fit = TimeFit(*(float(part) for part in parts))
    except (TypeError, ValueError):
        raise ValueError(f"time fit {text!r} is not A,B, two numbers of microseconds") from None
    if not np.isfinite(fit).all():
        raise ValueError(f"time fit {text!r} is not finite")
    return fit


def fit_points(path) -> TimeFit:
    """Least squares over measured points, a JSON file `[[R, microseconds], ...]`.

    Raises:
      ValueError: where the file does not hold two points of different R.
    """
    try:
        points = np.array(json.loads(Path(path).read_text()), dtype=np.float64)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"time points {path}: {error}") from None
    if points.ndim != 2 or points.shape[1] != 2 or not np.isfinite(points).all():
        raise ValueError(f"time points {path}: found shape {points.shape}, expected [[R, us], ...]")
    if np.ptp(points[:, 0]) == 0:
        raise ValueError(f"time points {path}: one R only; a line needs two")
    b, a = np.polyfit(points[:, 0], points[:, 1], 1)
    return TimeFit(float(a), float(b))
