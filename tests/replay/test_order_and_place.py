"""What stands in another order or place than usual: passes, layers, tensors, copies of experts."""

import types
import zipfile

import numpy as np
import pytest
from replay_helpers import write_tensorrt_llm

from jax_iser.replay.batch import Batch
from jax_iser.replay.policies import parse_policy
from jax_iser.replay.traces import open_traces, sglang, torch_zip
from jax_iser.replay.traces.errors import TraceError


def test_passes_of_sglang_go_by_their_number():
    records = [{"forward_pass_id": number, "rank": 0} for number in (7, 3, 5)]
    archive = types.SimpleNamespace(path="file.pt", content={"records": records})
    assert list(sglang._records([archive])) == [3, 5, 7]


def test_layers_of_tensorrt_go_by_their_number(tmp_path):
    """Layers 3 to 11: as text 10 and 11 would come first."""
    counts = np.random.default_rng(0).integers(1, 50, (2, 4, 9, 8))
    (trace,) = open_traces(write_tensorrt_llm(tmp_path / "folder", counts))
    found = np.array(list(trace.cut(4, 8192).counts))
    np.testing.assert_array_equal(found, counts.transpose(0, 2, 1, 3))


def tensor_of(storage_size, offset, shape, strides):
    storage = torch_zip._Storage(np.dtype("<i4"), "0", storage_size)
    return torch_zip._Machine("file.pt", b"")._tensor((storage, offset, shape, strides))


@pytest.fixture
def archive(tmp_path):
    """An archive whose one storage holds 0 to 11."""
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("file/data/0", np.arange(12, dtype="<i4").tobytes())
    opened = torch_zip.TorchArchive.__new__(torch_zip.TorchArchive)
    opened.path, opened._prefix = path, "file/"
    return opened


@pytest.mark.parametrize(
    ("offset", "shape", "strides"), [(0, (3, 4), (4, 1)), (5, (2, 3), (3, 1)), (1, (4, 2), (1, 4))]
)
def test_tensors_begin_at_their_offset_and_follow_their_strides(archive, offset, shape, strides):
    found = archive.read(tensor_of(12, offset, shape, strides), "field")
    places = offset + np.tensordot(np.array(strides), np.indices(shape), 1)
    np.testing.assert_array_equal(found, places)  # each value is its place


def test_a_tensor_that_ends_outside_its_storage_is_refused():
    assert tensor_of(12, 4, (2, 4), (4, 1)).shape == (2, 4)
    with pytest.raises(TraceError, match="ends outside its storage"):
        tensor_of(12, 5, (2, 4), (4, 1))


def planned(name, totals):
    """A policy's outcome on one plan of `[P, H]` routes by expert, all from rank 0."""
    counts = np.zeros((1, len(totals), np.size(totals)), np.int32)
    counts[0, 0] = np.reshape(totals, -1)
    return parse_policy(name)(slots=1).plan(Batch([counts]))


def test_capped_copies_go_to_the_coldest_rank():
    outcome = planned("p2p-capped:copies_per_owner=1", [[100], [10], [0], [20]])
    assert outcome.load.tolist() == [[67, 10, 33, 20]]  # T = 33


def test_all_rank_by_ranks_takes_experts_of_the_hottest_rank():
    """The heaviest expert of all is of the other one."""
    outcome = planned("all-rank:choose=rank", [[6, 6], [8, 0]])
    assert outcome.expert.tolist() == [0]
