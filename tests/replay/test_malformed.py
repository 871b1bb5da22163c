"""Broken and hostile files of every format: refused by file, field, found and expected."""

import contextlib
import io
import json
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_helpers import DATA, write_megatron, write_tensorrt_llm
from safetensors.numpy import save_file

from jax_iser.replay.traces import TraceError, open_traces
from jax_iser.replay.traces.torch_zip import TorchArchive


def drain(path, num_experts=None):
    """Opens and reads a trace to its end."""
    for trace in open_traces(path, num_experts):
        for _ in trace.cut(2, 4).counts:
            pass


def refused(path, field, num_experts=None):
    """The error of a file that must be refused; it names the file and the field."""
    with pytest.raises(TraceError) as caught:
        drain(path, num_experts)
    text = str(caught.value)
    assert field in text
    assert str(caught.value.path) in text
    assert "found" in text
    assert "expected" in text
    return text


NPZ = {
    "no topk_ids": ({"topk_ids": None}, "topk_ids"),
    "floats": ({"topk_ids": np.zeros((40, 3, 2))}, "topk_ids"),
    "two dimensions": ({"topk_ids": np.zeros((40, 6), np.uint8)}, "topk_ids"),
    "no token": ({"topk_ids": np.zeros((0, 3, 2), np.uint8)}, "tokens"),
    "too many layers": ({"topk_ids": np.zeros((1, 5000, 2), np.uint8)}, "layers"),
    "too wide": ({"topk_ids": np.zeros((40, 3, 65), np.uint8)}, "top_k"),
    "an id too large": ({"topk_ids": np.full((40, 3, 2), 8, np.uint8)}, "topk_ids"),
    "objects": ({"topk_ids": np.array([[[None]]], object)}, "object array"),
    "object lengths": ({"request_lengths": np.array([{}], object)}, "object array"),
    "lengths that do not sum": ({"request_lengths": np.array([1, 2])}, "request_lengths"),
    "negative lengths": ({"request_lengths": np.array([41, -1])}, "request_lengths"),
    "float lengths": ({"request_lengths": np.array([40.0])}, "request_lengths"),
    "no experts": ({"num_experts": None}, "--num-experts"),
    "experts as a list": ({"num_experts": np.array([8])}, "num_experts"),
    "too many experts": ({"num_experts": np.int64(10**6)}, "num_experts"),
    "zero experts": ({"num_experts": np.int64(0)}, "num_experts"),
    "short source ranks": ({"source_rank": np.zeros(3, int)}, "source_rank"),
    "negative source rank": ({"source_rank": np.full(40, -1)}, "source_rank"),
    "an id below -1": ({"topk_ids": np.full((40, 3, 2), -2, np.int8)}, "-2 of token 0, layer 0"),
    "no route": ({"topk_ids": np.full((40, 3, 2), -1, np.int8)}, "no route at all"),
    "zeros throughout": ({"topk_ids": np.zeros((40, 3, 2), np.int8)}, "no route at all"),
    "a type too narrow": (
        {"topk_ids": np.ones((40, 3, 2), np.int8), "num_experts": np.int32(200)},
        "int8, which ends at 127",
    ),
    "Fortran order": ({"topk_ids": np.zeros((40, 3, 2), np.uint8, order="F")}, "Fortran"),
}


@pytest.mark.parametrize("case", NPZ)
def test_npz(npz, case):
    changes, field = NPZ[case]
    refused(npz(**changes), field)


def test_npz_truncated_anywhere(npz, tmp_path):
    whole = npz().read_bytes()
    for size in (0, 3, 100, len(whole) // 2, len(whole) - 30):
        path = tmp_path / f"cut{size}.npz"
        path.write_bytes(whole[:size])
        refused(path, "found")


def test_npz_whose_header_lies(tmp_path):
    path = tmp_path / "lie.npz"
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000, 3, 2), }"
    header += b" " * (118 - len(header) - 1) + b"\n"
    npy = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\x00" * 60
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("topk_ids.npy", npy)
    refused(path, "topk_ids")


def test_npz_whose_header_is_a_program(tmp_path):
    path = tmp_path / "eval.npz"
    header = b"{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': ()}\n"
    npy = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("topk_ids.npy", npy)
    refused(path, "npy header")


def test_zip_bomb(tmp_path):
    path = tmp_path / "bomb.npz"
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((64 * 2**20 // 6, 3, 2), np.uint8))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("topk_ids.npy", buffer.getvalue())
    assert path.stat().st_size < 2**20
    assert "times the packed size" in refused(path, "topk_ids")


def test_zip_bomb_in_a_pt(tmp_path):
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + b"N" * 2**26 + b".")
    assert "times the packed size" in refused(path, "data.pkl")


def test_zip_with_a_name_twice(tmp_path):
    path = tmp_path / "twice.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("topk_ids.npy", b"")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("topk_ids.npy", b"")
    refused(path, "twice")


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickled_code_does_not_run(tmp_path, protocol):
    marker = tmp_path / "ran"
    program = pickle.dumps({"records": [Code(marker)]}, protocol)
    path = tmp_path / "code.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
    text = refused(path, "data.pkl")
    assert "posix.system" in text
    assert "code" in text
    bare = tmp_path / "bare.pt"
    bare.write_bytes(program)
    refused(bare, "bare pickle")
    assert not marker.exists()


PICKLES = {
    "empty": b"",
    "no end": b"\x80\x02}",
    "stack underflow": b"\x80\x020.",
    "append to nothing": b"\x80\x02Na.",
    "append to a dict": b"\x80\x02}Na.",
    "unknown memo": b"\x80\x02h\x05.",
    "unhashable key": b"\x80\x02}]Ns.",
    "an instance": b"\x80\x02(cos\nsystem\no.",
    "an old instance": b"\x80\x02(ios\nsystem\n.",
    "a build": b"\x80\x02}}b.",
    "an extension": b"\x80\x02\x82\x01.",
    "eval": b"\x80\x02cbuiltins\neval\n.",
    "torch itself": b"\x80\x02ctorch\nload\n.",
    "a rebuild without storage": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\x00)))t}R.",
    "a call of a number": b"\x80\x02K\x01)R.",
    "a foreign persistent id": b"\x80\x02K\x01Q.",
    "several values": b"\x80\x02K\x01K\x02.",
    "no bytes": b"\x80\x02U\xff.",
    "a long of a gigabyte": b"\x80\x02\x8b\xff\xff\xff\x3fabc.",
    "only a mark": b"\x80\x02(.",
    "a list": b"\x80\x02].",
    "text": b"\x80\x02X\x01\x00\x00\x00a.",
}


@pytest.mark.parametrize("case", PICKLES)
def test_broken_pickles(tmp_path, case):
    path = tmp_path / "broken.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", PICKLES[case])
    refused(path, "found")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (b"ccollections\nOrderedDict\n(]tR.", "a call of something else"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "a broken pickle"),
        (b"ctorch\nIntStorage\n)R.", "a call of something else"),
    ],
)
def test_names_are_called_as_torch_calls_them(tmp_path, program, words):
    path = tmp_path / "call.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + program)
    assert words in refused(path, "data.pkl")


def dumped(value) -> bytes:
    """An `.npy` as `np.save` writes a Python object."""
    stream = io.BytesIO()
    np.save(stream, value, allow_pickle=True)
    return stream.getvalue()


NUMPY_DICTS = {
    "no logical_count": (dumped({"count": np.ones((2, 4), int)}), "keys ['count']"),
    "a list in it": (dumped({"logical_count": [[1, 2]]}), "found list"),
    "floats": (dumped({"logical_count": np.ones((2, 4))}), "float64 of (2, 4)"),
    "one dimension": (dumped({"logical_count": np.ones(4, int)}), "int64 of (4,)"),
    "negative": (dumped({"logical_count": np.full((2, 4), -1)}), "values from -1"),
    "too large": (dumped({"logical_count": np.full((2, 4), 2**31)}), "values from 2147483648"),
    "no route": (dumped({"logical_count": np.zeros((2, 4), int)}), "no route at all"),
    "Fortran order": (dumped({"logical_count": np.ones((2, 4), int, order="F")}), "order"),
    "text": (dumped({"logical_count": np.array([["a"]])}), "an array of <U1"),
    "no dict": (dumped(np.array(3, object)), "no dict"),
    "a set": (dumped({"logical_count": {1}}), "opcode"),
    "a cut": (dumped({"logical_count": np.ones((2, 4), int)})[:-5], "array"),
}


@pytest.mark.parametrize("case", NUMPY_DICTS)
def test_dicts_of_arrays(tmp_path, case):
    content, words = NUMPY_DICTS[case]
    (tmp_path / "d.npy").write_bytes(content)
    assert words in refused(tmp_path / "d.npy", "found")


def test_code_in_a_dict_of_arrays_does_not_run(tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "d.npy").write_bytes(dumped({"logical_count": Code(marker)}))
    assert "posix.system" in refused(tmp_path / "d.npy", "code")
    assert not marker.exists()


def test_dicts_of_arrays_in_big_endian_and_narrow_types(tmp_path):
    counts = np.arange(8).reshape(2, 4)
    for dtype in (">i8", "<u2", "i1"):
        (tmp_path / "d.npy").write_bytes(dumped({"logical_count": counts.astype(dtype)}))
        (trace,) = open_traces(tmp_path / "d.npy", 4)
        np.testing.assert_array_equal(next(trace.cut(1, 1).counts)[:, 0], counts)


def rewrite(source, target, change):
    """A copy of an archive with its members changed by `change(name, data)`; None drops one."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if (data := change(name, old.read(name))) is not None:
                new.writestr(name, data)
    return target


PT = {
    "a storage is missing": lambda n, d: None if n.endswith("data/0") else d,
    "a storage is short": lambda n, d: d[:-4] if n.endswith("data/0") else d,
    "big-endian": lambda n, d: b"big" if n.endswith("byteorder") else d,
    "no pickle": lambda n, d: None if n.endswith("data.pkl") else d,
    "another type": lambda n, d: d.replace(b"IntStorage", b"QInt8Stora"),
    "a larger shape": lambda n, d: d.replace(b"K\x04K\x03K\x08\x87", b"K\x7fK\x03K\x08\x87"),
    "another key": lambda n, d: d.replace(b"logical_count", b"logical_cound"),
    "a storage name out of the archive": lambda n, d: d.replace(
        b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x00/"
    ),
}


@pytest.mark.parametrize("case", PT)
def test_pt(tmp_path, case):
    path = rewrite(DATA / "stat.pt", tmp_path / "stat.pt", PT[case])
    refused(path, "found")


def test_pt_modes_mixed(tmp_path):
    for name in ("stat.pt", "per_pass_0.pt"):
        (tmp_path / name).write_bytes((DATA / name).read_bytes())
    refused(tmp_path, "mode")


def test_pt_rank_twice(tmp_path):
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).write_bytes((DATA / "per_pass_0.pt").read_bytes())
    refused(tmp_path, "twice")


@settings(max_examples=150)
@given(data=st.data())
def test_fuzzed_pickles_build_data_or_are_refused(tmp_path_factory, data):
    with zipfile.ZipFile(DATA / "per_token_0.pt") as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        program = bytearray(archive.read(name))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(program) - 1))
        program[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("fuzz") / "fuzz.pt"
    path = rewrite(DATA / "per_token_0.pt", path, lambda n, d: bytes(program) if n == name else d)
    with contextlib.suppress(TraceError):
        drain(path)


@settings(max_examples=100)
@given(data=st.data())
def test_fuzzed_npz_reads_or_is_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "fuzz.npz"
    ids = np.random.default_rng(0).integers(0, 8, (40, 3, 2)).astype(np.uint8)
    np.savez(path, topk_ids=ids, request_lengths=np.array([20, 20]), num_experts=np.int32(8))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(TraceError):
        drain(path)


JSONS = {
    "empty": "",
    "not closed": '{"logical_count": [[1, 2]',
    "a list": "[1, 2]",
    "no known key": '{"counts": [[1, 2]]}',
    "ragged": '{"logical_count": [[1, 2], [3]]}',
    "text": '{"logical_count": [["a", "b"]]}',
    "one dimension": '{"logical_count": [1, 2]}',
    "negative": '{"logical_count": [[1, -2]]}',
    "not a number": '{"logical_count": [[1, NaN]]}',
    "infinite": '{"logical_count": [[1, 1e999]]}',
    "too large": '{"logical_count": [[1, 5000000000]]}',
    "all zero": '{"logical_count": [[0, 0]]}',
    "nothing": '{"logical_count": []}',
    "null": '{"logical_count": null}',
    "deep": '{"logical_count": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a huge integer": '{"logical_count": [[' + "9" * 10_000 + "]]}",
    "no history": '{"load_history": []}',
    "history of numbers": '{"load_history": [1]}',
    "history without loads": '{"load_history": [{"a": 1}]}',
    "history of two shapes": '{"load_history": [{"logical_expert_load": [[1, 2]]}, '
    '{"logical_expert_load": [[1, 2, 3]]}]}',
    "an empty file of one line": "\n",
    "too many routes together": '{"logical_count": [[2000000000, 2000000000]]}',
}


@pytest.mark.parametrize("case", JSONS)
def test_json(tmp_path, case):
    path = tmp_path / "counts.json"
    path.write_text(JSONS[case])
    refused(path, "found")


MEGATRON = {
    "no experts given": ({}, None, "--num-experts"),
    "an id too large": ({"top_indices": [[8, 0]]}, 8, "top_indices"),
    "an id below -1": ({"top_indices": [[-2, 0]]}, 8, "top_indices"),
    "ragged": ({"top_indices": [[1, 0], [1]]}, 8, "top_indices"),
    "text": ({"top_indices": [["x", 0]]}, 8, "top_indices"),
    "other tokens than it says": ({"num_tokens": 7}, 8, "top_indices"),
    "other top-k than it says": ({"topk": 3}, 8, "top_indices"),
    "no step": ({"step": None}, 8, "step"),
    "a float layer": ({"layer": 1.5}, 8, "layer"),
    "a negative rank": ({"rank": -1}, 8, "rank"),
    "another stage": ({"stage": "post_dispatch"}, 8, "stage"),
    "a stage as a number": ({"stage": 0}, 8, "stage"),
    "a block as a number": ({"block": 0}, 8, "block"),
    "an MTP head as a word": ({"mtp_idx": "first"}, 8, "mtp_idx"),
    "floats": ({"top_indices": [[0.0, 1.0]]}, 8, "top_indices"),
    "booleans": ({"top_indices": [[True, False]]}, 8, "top_indices"),
    "huge": ({"top_indices": [[2**70, 0]]}, 8, "top_indices"),
    "tokens without ids": ({"top_indices": [[]]}, 8, "top_indices"),
    "a number": ({"top_indices": 3}, 8, "top_indices"),
    "null": ({"top_indices": None}, 8, "top_indices"),
    "top-k as text": ({"topk": "2"}, 8, "topk"),
    "tokens as text": ({"num_tokens": None}, 8, "num_tokens"),
    "no route": ({"top_indices": [[-1, -1]]}, 8, "no route at all"),
}


@pytest.mark.parametrize("case", MEGATRON)
def test_megatron(tmp_path, case):
    changes, experts, field = MEGATRON[case]
    record = {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 0, "rank": 0}
    record |= {"num_tokens": 1, "topk": 2, "top_indices": [[0, 1]]}
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text(json.dumps(record | changes) + "\n")
    refused(path, field, experts)


def test_megatron_with_a_broken_line(tmp_path):
    folder = write_megatron(tmp_path / "r", np.zeros((1, 1, 2, 3, 2), int))
    path = folder / "router_trace_rank0.jsonl"
    path.write_text(path.read_text() + '{"step": ')
    refused(folder, "line 3", 8)


def test_megatron_with_an_endless_line(tmp_path, monkeypatch):
    from jax_iser.replay.traces import errors, text

    monkeypatch.setattr(text, "LIMITS", errors.Limits(line_bytes=100))
    folder = write_megatron(tmp_path / "r", np.zeros((1, 1, 1, 30, 2), int))
    refused(folder, "line 1", 8)


def break_tensorrt_llm(folder, case):
    rank1 = folder / "rank1.safetensors"
    zero = np.zeros(8, np.int32)
    if case == "broken meta":
        (folder / "meta_info.json").write_text("{")
    elif case == "meta without experts":
        (folder / "meta_info.json").write_text("{}")
    elif case == "meta with text":
        (folder / "meta_info.json").write_text('{"num_experts": "8"}')
    elif case == "a rank is missing":
        (folder / "rank0.safetensors").unlink()
    elif case == "no rank":
        for path in folder.glob("rank*"):
            path.unlink()
    elif case == "a truncated file":
        rank1.write_bytes(rank1.read_bytes()[:-20])
    elif case == "a header that lies":
        rank1.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    elif case == "keys that are no grid":
        save_file({"102_3": zero}, rank1)
    elif case == "no keys":
        for path in folder.glob("rank*"):
            save_file({}, path)
    elif case == "no routes":
        for path in folder.glob("rank*"):
            save_file({f"{s}_{la}": zero for s in (100, 101) for la in (3, 4)}, path)
    elif case == "top-k as text":
        (folder / "meta_info.json").write_text('{"num_experts": 8, "num_experts_per_token": "2"}')
    elif case == "top-k as null":
        (folder / "meta_info.json").write_text('{"num_experts": 8, "num_experts_per_token": null}')
    elif case == "a strange key":
        save_file({"weight": zero}, rank1)
    elif case == "floats":
        save_file({f"{s}_{la}": zero + 0.5 for s in (100, 101) for la in (3, 4)}, rank1)
    elif case == "other experts":
        save_file({f"{s}_{la}": zero[:7] for s in (100, 101) for la in (3, 4)}, rank1)
    elif case == "negative":
        save_file({f"{s}_{la}": zero - 1 for s in (100, 101) for la in (3, 4)}, rank1)


@pytest.mark.parametrize(
    "case",
    [
        "broken meta",
        "meta without experts",
        "meta with text",
        "a rank is missing",
        "no rank",
        "a truncated file",
        "a header that lies",
        "keys that are no grid",
        "no keys",
        "no routes",
        "top-k as text",
        "top-k as null",
        "a strange key",
        "floats",
        "other experts",
        "negative",
    ],
)
def test_tensorrt_llm(tmp_path, case):
    folder = write_tensorrt_llm(tmp_path / "stats", np.ones((2, 2, 2, 8), int))
    drain(folder)
    break_tensorrt_llm(folder, case)
    refused(folder, "found")


def test_safetensors_alone(tmp_path):
    save_file({"100_3": np.zeros(8, np.int32)}, tmp_path / "rank0.safetensors")
    refused(tmp_path / "rank0.safetensors", "meta_info.json")


def test_npy(tmp_path):
    path = tmp_path / "routed.npy"
    np.save(path, np.zeros((20, 2, 2), np.int16))
    refused(path, "--num-experts")
    path.write_bytes(path.read_bytes()[:-1])
    refused(path, "array", 8)
    np.save(path, np.array([None]), allow_pickle=True)
    refused(path, "object array", 8)


def test_other_files_and_folders(tmp_path, npz):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    refused(path, "file")
    refused(tmp_path / "missing", "file")
    folder = tmp_path / "empty"
    folder.mkdir()
    refused(folder, "no trace")
    np.save(folder / "a.npy", np.zeros((2, 2, 2), np.int16))
    (folder / "b.npz").write_bytes(npz().read_bytes())
    refused(folder, "kinds")


def test_experts_that_differ_from_the_option(npz):
    assert "as --num-experts says" in refused(npz(), "num_experts", 16)


def test_tensors_are_lazy(tmp_path):
    """A storage that is damaged is refused when it is read, not before: nothing else is read."""
    path = rewrite(DATA / "stat.pt", tmp_path / "s.pt", PT["a storage is short"])
    archive = TorchArchive(path)
    with pytest.raises(TraceError, match="storage of"):
        archive.read(archive.content["logical_count"], "logical_count")
