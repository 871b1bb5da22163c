"""Every format read back, and how tokens and counts are cut into iterations."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from replay_helpers import DATA, collect, write_megatron, write_tensorrt_llm

from jax_iser.replay.traces import open_traces, write_npz
from jax_iser.replay.traces import tokens as tokens_module
from jax_iser.replay.traces.sglang import read_sglang
from jax_iser.replay.traces.tokens import TokenTrace

RECORDED = Path(__file__).resolve().parents[3] / "shared" / "traces" / "gpt_oss_20b"


def naive_counts(ids, rank, chunk, num_ranks, num_experts):
    """`[I, L, P, E]` token by token."""
    iterations = min(np.bincount(rank, minlength=num_ranks)) // chunk
    counts = np.zeros((iterations, ids.shape[1], num_ranks, num_experts), np.int64)
    seen = [0] * num_ranks
    for token, r in zip(ids, rank, strict=True):
        i = seen[r] // chunk
        seen[r] += 1
        if i < iterations:
            for layer, experts in enumerate(token):
                for e in experts:
                    if 0 <= e < num_experts:
                        counts[i, layer, r, e] += 1
    return counts


def token_trace(ids, lengths=None, source=None, num_experts=8):
    sizes = (len(ids), *ids.shape[1:], num_experts)
    return TokenTrace("file", "t", *sizes, lambda n: blocks_of(ids, n), lengths, source)


def in_chunks(tokens, chunk):
    return tokens // chunk * chunk if tokens >= chunk else tokens


@settings(max_examples=80)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=4, max_size=12),
    chunk=st.integers(1, 6),
    routes=st.sampled_from([1, 40, 2**21]),
    seed=st.integers(0, 99),
)
def test_requests_go_round_robin_in_equal_chunks(lengths, chunk, routes, seed):
    assume(sum(lengths))
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 8, (sum(lengths), 2, 3))
    ids[rng.random(ids.shape) < 0.2] = -1
    ids[0] = 1
    before = tokens_module._ROUTES_PER_BLOCK
    tokens_module._ROUTES_PER_BLOCK = routes
    try:
        cut = token_trace(ids, lengths).cut(4, chunk)
        found = collect(cut)
    finally:
        tokens_module._ROUTES_PER_BLOCK = before
    asked = [length for length in lengths if length]
    rank = np.repeat(np.arange(len(asked)) % 4, asked)
    fewest, run = int(np.bincount(rank, minlength=4).min()), len(ids) // 4
    equal = not fewest or 2 * in_chunks(fewest, chunk) < in_chunks(run, chunk)
    if equal:  # too few requests, or too uneven ones
        rank = np.minimum(np.arange(len(ids)) // max(run, 1), 3)
        fewest = int(np.bincount(rank, minlength=4).min())
    size = min(chunk, fewest)
    assert cut.tokens_per_rank == size
    assert any("equal run" in note for note in cut.notes) == equal
    assert any("cannot fill" in note for note in cut.notes) == (size < chunk)
    used = 4 * size * (fewest // size if size else 0)
    unused = f"{len(ids) - used} of {len(ids)} tokens are not replayed"
    assert any(note.startswith(unused) for note in cut.notes) == (used < len(ids))
    if size:
        expected = naive_counts(ids, rank, size, 4, 8)
        assert cut.num_iterations == len(expected)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("lengths", "chunk", "used", "words"),
    [
        ([0, 100, 0, 0, 156, 0], 8192, 256, "2 requests cannot go round 4 ranks"),
        ([1, 2, 3, 50, 100, 100], 8192, 256, "leave one of them with 3 of 256 tokens"),
        ([64, 0, 64, 0, 64, 64], 8192, 256, None),
        ([40, 50, 60, 106], 8192, 160, "96 of 256 tokens are not replayed"),
        ([40, 50, 60, 106], 16, 128, "128 of 256 tokens are not replayed"),
    ],
)
def test_uneven_requests_are_replayed_as_far_as_they_go(lengths, chunk, used, words):
    ids = np.random.default_rng(0).integers(1, 8, (256, 2, 2))
    cut = token_trace(ids, lengths).cut(4, chunk)
    assert collect(cut).sum() == used * 4
    assert words is None or words in " ".join(cut.notes)
    assert ("not replayed" in " ".join(cut.notes)) == (used < 256)


def test_repeats_are_told_once_per_token():
    ids = np.array([[[0, 1], [2, 3]], [[1, 1], [4, 4]], [[5, 6], [-1, -1]], [[7, 7], [0, 1]]])
    notes = " ".join(token_trace(ids).cut(1, 4).notes)
    assert "2 of the first 4 tokens name an expert twice" in notes
    assert "twice" not in " ".join(token_trace(ids[::2]).cut(1, 2).notes)


@pytest.mark.parametrize(
    ("tokens", "used", "words"),
    [
        ([199, 19, 19, 19], 76, "180 of 256 tokens are not replayed at EP4"),
        ([128, 0, 64, 64], 256, "no token of rank 1 of 4: 1 requests cannot go round 4"),
    ],
)
def test_uneven_recorded_ranks(tokens, used, words):
    ids = np.random.default_rng(0).integers(1, 8, (256, 2, 2))
    cut = token_trace(ids, source=np.repeat(np.arange(4), tokens)).cut(4, 8192)
    assert collect(cut).sum() == used * 4
    assert words in ": ".join(cut.notes)


def test_fewer_tokens_than_ranks():
    cut = token_trace(np.ones((3, 2, 2), int)).cut(4, 8)
    assert (cut.num_iterations, cut.tokens_per_rank, list(cut.counts)) == (0, 0, [])


def blocks_of(ids, rows):
    for start in range(0, len(ids), rows):
        yield ids[start : start + rows]


def test_npz_and_its_source_ranks(npz):
    ids = np.random.default_rng(1).integers(0, 8, (40, 3, 2)).astype(np.uint8)
    source = np.arange(40) % 4
    (trace,) = open_traces(npz(topk_ids=ids, source_rank=source))
    assert (trace.num_tokens, trace.num_layers, trace.top_k, trace.num_experts) == (40, 3, 2, 8)
    expected = naive_counts(ids, source, 5, 4, 8)
    np.testing.assert_array_equal(collect(trace.cut(4, 5)), expected)
    merged = naive_counts(ids, source // 2, 5, 2, 8)
    np.testing.assert_array_equal(collect(trace.cut(2, 5)), merged)
    assert "recorded ranks are not 8" in " ".join(trace.cut(8, 5).notes)


def test_format_is_told_from_the_content(npz, tmp_path):
    path = npz()
    other = tmp_path / "routes.json"
    other.write_bytes(path.read_bytes())
    (trace,) = open_traces(other)
    assert trace.num_tokens == 40


def test_compressed_npz_reads_alike(npz, tmp_path):
    arrays = dict(np.load(npz()))
    np.savez_compressed(tmp_path / "small.npz", **arrays)
    one, other = open_traces(npz())[0], open_traces(tmp_path / "small.npz")[0]
    np.testing.assert_array_equal(collect(one.cut(2, 10)), collect(other.cut(2, 10)))


def test_fewer_requests_than_ranks_get_equal_runs(npz):
    (trace,) = open_traces(npz(request_lengths=np.array([40])))
    cut = trace.cut(4, 10)
    assert cut.num_iterations == 1
    assert "1 requests cannot go round 4 ranks" in cut.notes[0]
    ids = np.load(trace.path)["topk_ids"]
    expected = naive_counts(ids, np.arange(40) // 10, 10, 4, 8)
    np.testing.assert_array_equal(collect(cut), expected)


def test_write_npz_round_trip(tmp_path):
    ids = np.random.default_rng(2).integers(0, 300, (12, 2, 4)).astype(np.uint16)
    write_npz(tmp_path / "t.npz", ids, [12], 300)
    (trace,) = open_traces(tmp_path / "t.npz")
    assert collect(trace.cut(1, 12)).sum() == ids.size


def test_vllm_routed_experts(tmp_path):
    ids = np.random.default_rng(3).integers(0, 16, (20, 4, 2)).astype(np.int16)
    np.save(tmp_path / "routed.npy", ids)
    (trace,) = open_traces(tmp_path / "routed.npy", num_experts=16)
    np.testing.assert_array_equal(
        collect(trace.cut(2, 10)), naive_counts(ids, np.arange(20) // 10, 10, 2, 16)
    )


@pytest.mark.parametrize("steps", [1, 3])
def test_json_counts_of_sglang(tmp_path, steps):
    counts = np.random.default_rng(4).integers(1, 50, (steps, 2, 8))
    value = counts.tolist() if steps > 1 else counts[0].tolist()
    (tmp_path / "c.json").write_text(json.dumps({"logical_count": value}))
    (trace,) = open_traces(tmp_path / "c.json")
    cut = trace.cut(4, 8192)
    found = collect(cut)
    np.testing.assert_array_equal(found.sum(axis=2), counts)
    assert (found.max(axis=2) - found.min(axis=2) <= 1).all()  # spread evenly
    rows = found.sum(axis=3)
    assert (rows.max(axis=2) - rows.min(axis=2) <= 1).all()  # and so are the remainders
    assert "sources spread evenly over 4 ranks" in cut.notes


def test_json_load_history_of_vllm(tmp_path):
    history = [{"logical_expert_load": [[1.5, 2, 3, 4]]}, {"logical_expert_load": [[0, 0, 0, 4]]}]
    (tmp_path / "h.json").write_text(json.dumps({"load_history": history}))
    (trace,) = open_traces(tmp_path / "h.json")
    assert "loads rounded to whole routes" in trace.notes
    assert collect(trace.cut(2, 1)).sum(axis=2)[:, 0].tolist() == [[2, 2, 3, 4], [0, 0, 0, 4]]


def test_tensorrt_llm(tmp_path):
    counts = np.random.default_rng(5).integers(0, 50, (3, 4, 2, 8))
    folder = write_tensorrt_llm(tmp_path / "stats", counts)
    for path in (folder, folder / "meta_info.json", folder / "rank2.safetensors"):
        (trace,) = open_traces(path)
        np.testing.assert_array_equal(collect(trace.cut(4, 1)), counts.transpose(0, 2, 1, 3))
    merged = counts.reshape(3, 2, 2, 2, 8).sum(axis=2).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(collect(trace.cut(2, 1)), merged)
    spread = collect(trace.cut(8, 1))
    np.testing.assert_array_equal(spread.sum(axis=2), counts.sum(axis=1))
    assert trace.top_k == 2


def test_megatron(tmp_path):
    ids = np.random.default_rng(6).integers(0, 8, (2, 4, 3, 5, 2))
    folder = write_megatron(tmp_path / "router", ids)
    (trace,) = open_traces(folder, num_experts=8)
    found = collect(trace.cut(4, 1))
    for step in range(2):
        for rank in range(4):
            for layer in range(3):
                expected = np.bincount(ids[step, rank, layer].ravel(), minlength=8)
                assert found[step, layer, rank].tolist() == expected.tolist()


def test_sglang_stat_of_real_torch():
    (trace,) = open_traces(DATA / "stat.pt")
    found = collect(trace.cut(4, 1))
    assert found.shape == (3, 2, 4, 8)  # less the dense layer and the unused step
    assert found.sum() == 1233
    assert len(trace.notes) == 2


def test_sglang_per_pass_of_real_torch():
    trace = read_sglang([DATA / f"per_pass_{r}.pt" for r in range(2)], "per_pass")
    found = collect(trace.cut(2, 1))
    assert found.shape == (3, 3, 2, 8)
    assert found.sum(axis=(1, 3)).tolist() == [[146, 119], [120, 122], [116, 113]]


def test_sglang_per_token_of_real_torch():
    trace = read_sglang([DATA / f"per_token_{r}.pt" for r in range(2)], "per_token")
    cut = trace.cut(2, 5)
    found = collect(cut)
    assert (cut.num_iterations, trace.num_experts, trace.top_k) == (3, 8, 2)
    # Five tokens of two experts a layer, one of them padding.
    assert (found.sum(axis=3) == 9).all()


def test_sglang_folder_of_a_recording(tmp_path):
    for rank in range(2):
        name = f"expert_distribution_recorder_17.5_{rank}.pt"
        (tmp_path / name).write_bytes((DATA / f"per_pass_{rank}.pt").read_bytes())
    (trace,) = open_traces(tmp_path)
    assert trace.num_sources == 2


def test_a_long_trace_is_streamed(tmp_path):
    """Memory stays far below the trace's size."""
    import tracemalloc

    path = tmp_path / "long.npz"
    ids = np.zeros((60_000, 40, 8), np.uint16)
    ids += np.arange(8, dtype=np.uint16)
    write_npz(path, ids, [60_000], 16)
    size = ids.nbytes
    del ids
    (trace,) = open_traces(path)
    tracemalloc.start()
    total = sum(int(c.sum()) for c in trace.cut(2, 10_000).counts)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 60_000 * 40 * 8
    # Blocks of 2**21 routes take about 100 MB; the trace is twice that and is not held.
    assert peak < 3.5 * size
    big = peak
    tokens_module_limit = tokens_module._ROUTES_PER_BLOCK
    tokens_module._ROUTES_PER_BLOCK = 2**17
    try:
        tracemalloc.start()
        for _ in trace.cut(2, 10_000).counts:
            pass
        _, small = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    finally:
        tokens_module._ROUTES_PER_BLOCK = tokens_module_limit
    assert small < size / 4 < big


@pytest.mark.skipif(not RECORDED.is_dir(), reason=f"{RECORDED} is not there")
def test_recorded_traces_of_gpt_oss():
    traces = open_traces(RECORDED)
    assert len(traces) == 7
    for trace in traces:
        assert (trace.num_layers, trace.num_experts, trace.top_k) == (24, 32, 4)
        for ranks in (4, 8, 16):
            cut = trace.cut(ranks, 8192)
            first = next(cut.counts)
            assert (first.sum(axis=2) == cut.tokens_per_rank * 4).all()
            assert any(f"EP{ranks}" in note for note in cut.notes)
