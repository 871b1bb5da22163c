"""Each recorder's files in the shape that it writes them, read back as the routes they record."""

import json

import numpy as np
import pytest
import recorders
from replay_helpers import collect

from jax_iser.replay.engine import replay
from jax_iser.replay.policies import parse_policy
from jax_iser.replay.traces import TraceError, open_traces, sniff

PASSES, RANKS, TOKENS, LAYERS, TOP_K, EXPERTS = 3, 4, 8, 5, 2, 16
DENSE = [0, 3]  # the first layer of many models, and one of an interleaved model


def routed_ids(seed=0, top_k=TOP_K) -> np.ndarray:
    """`[passes, ranks, tokens, layers, top_k]` of distinct, skewed experts; dense layers are -1."""
    rng = np.random.default_rng(seed)
    score = rng.gumbel(size=(PASSES, RANKS, TOKENS, LAYERS, EXPERTS))
    score += rng.normal(scale=1.5, size=(LAYERS, EXPERTS))
    ids = np.argsort(-score, axis=-1)[..., :top_k].astype(np.int32)
    ids[:, :, :, DENSE] = -1
    return ids


IDS = routed_ids()
COUNTS = np.delete(recorders.counts_of(IDS, EXPERTS), DENSE, axis=2).transpose(0, 2, 1, 3)
SUMS = COUNTS.sum(axis=2)
LEFT_OUT = "2 layers without a route left out"


def opened(path, *, rank=None, experts=None):
    (trace,) = open_traces(path if rank is None else path / rank, experts)
    assert trace.num_experts == EXPERTS
    return trace


@pytest.mark.parametrize("redundant", [0, 2])
def test_sglang_per_token(tmp_path, redundant):
    trace = opened(recorders.sglang_per_token(tmp_path / "r", IDS, EXPERTS, redundant))
    assert trace.num_layers == LAYERS - 2
    assert any(note.startswith(LEFT_OUT) for note in trace.notes)
    np.testing.assert_array_equal(collect(trace.cut(RANKS, TOKENS)), COUNTS)


@pytest.mark.parametrize("redundant", [0, 2])
def test_sglang_per_pass(tmp_path, redundant):
    trace = opened(recorders.sglang_per_pass(tmp_path / "r", IDS, EXPERTS, redundant))
    assert (trace.num_layers, trace.num_sources) == (LAYERS - 2, RANKS)
    assert any(note.startswith(LEFT_OUT) for note in trace.notes)
    assert not any("received" in note for note in trace.notes)
    np.testing.assert_array_equal(collect(trace.cut(RANKS, 1)), COUNTS)


@pytest.mark.parametrize("files", [RANKS, 2])
def test_counts_that_a_rank_received_are_not_taken_for_its_own(tmp_path, files):
    folder = recorders.sglang_low_latency(tmp_path / "r", IDS, EXPERTS)
    for path in sorted(folder.iterdir())[files:]:
        path.unlink()
    trace = opened(folder)
    assert trace.num_sources == 1
    assert any("what it received" in note for note in trace.notes)
    found = collect(trace.cut(RANKS, 1))
    table = np.delete(recorders.physical_map(LAYERS, EXPERTS, 0), DENSE, axis=0)
    held = np.zeros(table.shape, bool)  # experts of the ranks whose files are there
    np.put_along_axis(held, table[:, : EXPERTS // RANKS * files], True, axis=1)
    np.testing.assert_array_equal(found.sum(axis=2), np.where(held, SUMS, 0))
    assert (found.max(axis=2) - found.min(axis=2) <= 1).all()  # sources spread evenly


def test_sglang_stat(tmp_path):
    trace = opened(recorders.sglang_stat(tmp_path / "r", IDS, EXPERTS))
    assert any(note.startswith("2 steps without a route") for note in trace.notes)
    np.testing.assert_array_equal(collect(trace.cut(RANKS, 1)).sum(axis=2), SUMS)


def test_sglang_jax(tmp_path):
    trace = opened(recorders.sglang_jax(tmp_path / "r", IDS, EXPERTS))
    np.testing.assert_array_equal(collect(trace.cut(RANKS, 1))[0].sum(axis=1), SUMS.sum(axis=0))


@pytest.mark.parametrize("writer", [recorders.json_counts, recorders.load_history])
def test_json(tmp_path, writer):
    trace = opened(writer(tmp_path / "r", IDS, EXPERTS))
    np.testing.assert_array_equal(collect(trace.cut(RANKS, 1)).sum(axis=2), SUMS)


def test_one_line_of_json_with_num_experts_is_no_meta_info(tmp_path):
    folder = recorders.load_history(tmp_path / "r", IDS, EXPERTS)
    assert sniff(folder / "expert-load.json") == "json"
    assert sniff(recorders.tensorrt_llm(tmp_path / "t", IDS, EXPERTS) / "meta_info.json") == (
        "meta_info"
    )


def test_vllm_routed_experts_with_dense_layers_of_zeros(tmp_path):
    trace = opened(recorders.vllm_routed_experts(tmp_path / "r", IDS), experts=EXPERTS)
    assert trace.num_layers == LAYERS - 2
    assert any(note.startswith(LEFT_OUT) for note in trace.notes)
    found = collect(trace.cut(1, TOKENS))  # a chunk is what a rank brought to a pass
    np.testing.assert_array_equal(
        found[:, :, 0], COUNTS.transpose(0, 2, 1, 3).reshape(-1, LAYERS - 2, EXPERTS)
    )


def test_zeros_of_models_with_one_expert_a_token(tmp_path):
    """Where a token has one expert, zeros are expert 0 unless another layer says otherwise."""
    ids = routed_ids(top_k=1)
    trace = opened(recorders.vllm_routed_experts(tmp_path / "r", ids), experts=EXPERTS)
    assert trace.num_layers == LAYERS - 2
    np.save(tmp_path / "zeros.npy", np.zeros((8, 2, 1), np.int32))
    (trace,) = open_traces(tmp_path / "zeros.npy", EXPERTS)
    assert (trace.num_layers, collect(trace.cut(2, 4))[..., 0].sum()) == (2, 16)


def test_a_token_with_one_of_two_experts_routes_to_expert_zero(tmp_path):
    ids = np.full((8, 2, 2), -1, np.int32)
    ids[:, 1, 0] = 0
    np.save(tmp_path / "half.npy", ids)
    (trace,) = open_traces(tmp_path / "half.npy", EXPERTS)
    assert (trace.num_layers, collect(trace.cut(2, 4))[..., 0].sum()) == (1, 8)


@pytest.mark.parametrize("extra", [False, True])
def test_tensorrt_llm(tmp_path, extra):
    trace = opened(recorders.tensorrt_llm(tmp_path / "r", IDS, EXPERTS, extra))
    assert (trace.num_sources, trace.top_k) == (RANKS, TOP_K)
    np.testing.assert_array_equal(collect(trace.cut(RANKS, 1)), COUNTS)


def test_tensorrt_llm_with_a_rank_that_idled(tmp_path):
    folder = recorders.tensorrt_llm(tmp_path / "r", IDS, EXPERTS)
    recorders.save_file({}, folder / "rank2.safetensors")
    trace = opened(folder)
    assert any("1 of 4 ranks lack some" in note for note in trace.notes)
    expected = COUNTS.copy()
    expected[:, :, 2] = 0
    np.testing.assert_array_equal(collect(trace.cut(RANKS, 1)), expected)


@pytest.mark.parametrize("extra", [False, True])
def test_megatron(tmp_path, extra):
    trace = opened(recorders.megatron(tmp_path / "r", IDS, extra=extra), experts=EXPERTS)
    assert (trace.num_layers, trace.num_sources, trace.top_k) == (LAYERS - 2, RANKS, TOP_K)
    np.testing.assert_array_equal(collect(trace.cut(RANKS, 1)), COUNTS)


def test_megatron_mtp_layers_are_layers_of_their_own(tmp_path):
    """An MTP layer has the number of a decoder layer; its block and head tell it apart."""
    ids = IDS[:, :, :, [1, 2]]
    trace = opened(recorders.megatron(tmp_path / "r", ids, mtp=IDS[:, :, :, [4]]), experts=EXPERTS)
    expected = recorders.counts_of(IDS[:, :, :, [1, 2, 4]], EXPERTS).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(collect(trace.cut(RANKS, 1)), expected)


def test_megatron_heads_of_mtp_do_not_collide(tmp_path):
    folder = recorders.megatron(tmp_path / "r", IDS[:1, :1, :, [1]], mtp=IDS[:1, :1, :, [2]])
    path = folder / "router_trace_rank0.jsonl"
    second = json.loads(path.read_text().splitlines()[-1]) | {"mtp_idx": 1}
    path.write_text(path.read_text() + json.dumps(second) + "\n")
    assert opened(folder, experts=EXPERTS).num_layers == 3


def test_megatron_micro_batches_are_calls_of_their_own(tmp_path):
    folder = recorders.megatron(tmp_path / "r", IDS)
    for path in folder.glob("router_trace_rank?.jsonl"):
        path.write_text(path.read_text().replace('"step": 1,', '"step": 0,'))
    trace = opened(folder, experts=EXPERTS)
    assert trace.num_steps == PASSES
    np.testing.assert_array_equal(collect(trace.cut(RANKS, 1)), COUNTS)


def test_megatron_ranks_without_tokens(tmp_path):
    ids = IDS.copy()
    ids[1, 2] = -1
    trace = opened(recorders.megatron(tmp_path / "r", ids), experts=EXPERTS)
    expected = COUNTS.copy()
    expected[1, :, 2] = 0
    np.testing.assert_array_equal(collect(trace.cut(RANKS, 1)), expected)


def test_megatron_with_empty_files_only(tmp_path):
    (tmp_path / "router_trace_rank0.jsonl").write_bytes(b"")
    with pytest.raises(TraceError, match="no trace"):
        open_traces(tmp_path, EXPERTS)
    with pytest.raises(TraceError, match="an empty file"):
        open_traces(tmp_path / "router_trace_rank0.jsonl", EXPERTS)


def test_dense_layers_do_not_dilute_the_imbalance(tmp_path):
    """The same routing by every recorder that knows sources: one imbalance, that of its layers."""
    folders = {
        "per_token": (recorders.sglang_per_token(tmp_path / "a", IDS, EXPERTS), None),
        "per_pass": (recorders.sglang_per_pass(tmp_path / "b", IDS, EXPERTS), None),
        "low_latency": (recorders.sglang_low_latency(tmp_path / "c", IDS, EXPERTS), None),
        "stat": (recorders.sglang_stat(tmp_path / "d", IDS, EXPERTS), None),
        "tensorrt": (recorders.tensorrt_llm(tmp_path / "e", IDS, EXPERTS), None),
        "megatron": (recorders.megatron(tmp_path / "f", IDS), EXPERTS),
    }
    load = SUMS.reshape(PASSES, LAYERS - 2, RANKS, -1).sum(axis=3)
    expected = (load.max(axis=2) / load.mean(axis=2)).mean()
    for name, (folder, experts) in folders.items():
        (trace,) = open_traces(folder, experts)
        (row,), _ = replay(trace, RANKS, [parse_policy("none")], tokens_per_rank=TOKENS)
        assert row.figures["imbalance_off"] == pytest.approx(expected), name
        assert row.figures["layers"] == LAYERS - 2


def test_ids_that_wrapped_are_told_with_their_place(tmp_path):
    ids = np.random.default_rng(0).integers(0, 200, (40, 3, 2)).astype(np.uint8).view(np.int8)
    np.save(tmp_path / "wrapped.npy", ids.astype(np.int16))
    token, layer, place = np.argwhere(ids < -1)[0]
    wanted = f"id {ids[token, layer, place]} of token {token}, layer {layer}, place {place}"
    with pytest.raises(TraceError, match=wanted):
        open_traces(tmp_path / "wrapped.npy", 200)
    np.save(tmp_path / "narrow.npy", ids)
    with pytest.raises(TraceError, match="int8, which ends at 127"):
        open_traces(tmp_path / "narrow.npy", 200)


def test_places_of_wrong_ids_count_from_the_start_of_the_trace(tmp_path, monkeypatch):
    from jax_iser.replay.traces import tokens

    monkeypatch.setattr(tokens, "_ROUTES_PER_BLOCK", 12)
    ids = np.ones((40, 3, 2), np.int16)
    ids[:, 0] = 0  # a layer that keeps the reader looking to the end
    ids[37, 1, 1] = -7
    np.save(tmp_path / "late.npy", ids)
    with pytest.raises(TraceError, match="id -7 of token 37, layer 1, place 1"):
        open_traces(tmp_path / "late.npy", 16)
