"""A Domain over several processes computes the bits of one process."""

import pathlib
import sys

import numpy as np
import pytest
from layers import assert_same_bits, run_layer
from processes import finish, start_processes

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from layer_program import CASES, problem_of  # noqa: E402


def run_processes(num_processes, folder):
    """Fills the folder with every process's shards and plans."""
    program = HERE / "layer_program.py"
    processes = start_processes(program, num_processes, 8 // num_processes, str(folder))
    for index, (code, out, err) in enumerate(finish(processes, 150)):
        assert code == 0, f"process {index} ended with {code}:\n{err[-4000:]}"
        assert out.strip().endswith("done")


def check_call(folder, name, call, y, plan):
    parts = sorted(folder.glob(f"{name}-{call}-*.bin"))
    assert len(parts) == 8
    found = np.frombuffer(b"".join(part.read_bytes() for part in parts), y.dtype)
    assert_same_bits(found.reshape(y.shape), y, f"{name}, call {call}")
    plans = sorted(folder.glob(f"{name}-{call}-plan*.npz"))
    assert plans
    for path in plans:
        with np.load(path) as saved:
            np.testing.assert_array_equal(saved["load"], plan.load)
            np.testing.assert_array_equal(saved["broadcasts"], plan.broadcasts)


@pytest.mark.parametrize("num_processes", [2, 4])
def test_same_bits_as_one_process(num_processes, tmp_path):
    run_processes(num_processes, tmp_path)
    for name, (_, options) in CASES.items():
        y, plan = run_layer(problem_of(name), **options)
        assert plan.num_broadcasts > 0
        for call in range(2):
            check_call(tmp_path, name, call, y, plan)
