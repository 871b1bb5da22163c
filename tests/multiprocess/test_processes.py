"""A Domain over several processes computes the bits of one process."""

import pathlib
import sys

import numpy as np
import pytest
from layers import run_layer
from processes import finish, start_processes

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from layer_program import CASES, problem_of  # noqa: E402


@pytest.fixture(scope="module", params=[2, 4])
def shards(request, tmp_path_factory):
    """The folder that the processes of one run have filled, and how many there were."""
    folder = tmp_path_factory.mktemp("shards")
    num_processes = request.param
    processes = start_processes(
        HERE / "layer_program.py", num_processes, 8 // num_processes, str(folder)
    )
    for index, (code, out, err) in enumerate(finish(processes, 150)):
        assert code == 0, f"process {index} ended with {code}:\n{err[-4000:]}"
        assert out.strip().endswith("done")
    return folder, num_processes


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_one_process(shards, name):
    folder, num_processes = shards
    y, plan = run_layer(problem_of(name), **CASES[name][1])
    assert plan.num_broadcasts > 0
    for call in range(2):
        parts = sorted(folder.glob(f"{name}-{call}-*.bin"))
        assert len(parts) == 8
        found = b"".join(part.read_bytes() for part in parts)
        assert found == y.tobytes(), f"{name}, call {call}: other bits than one process"
        for index in range(num_processes):
            with np.load(folder / f"{name}-{call}-plan{index}.npz") as saved:
                np.testing.assert_array_equal(saved["load"], plan.load)
                np.testing.assert_array_equal(saved["broadcasts"], plan.broadcasts)
