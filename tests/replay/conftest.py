"""Helpers on the path of every test here, and a writer of our `.npz`."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def npz(tmp_path):
    """Writes our `.npz` from arrays, overridden or left out (None) by keyword."""

    def write(name="trace.npz", **changes):
        arrays = {
            "topk_ids": np.random.default_rng(0).integers(0, 8, (40, 3, 2)).astype(np.uint8),
            "request_lengths": np.array([10, 5, 20, 5], np.int32),
            "num_experts": np.int32(8),
        } | changes
        path = tmp_path / name
        np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
        return path

    return write
