"""`jax-iser plan`: what it explains against the NumPy twin of the planner."""

import json
import sys

import numpy as np
import pytest

from jax_iser.cli import main
from jax_iser.cli.plan import HOW
from jax_iser.plan import COPY_RULES, group_levels
from jax_iser.reference.planner import plan_counts

KNOBS = [
    {},
    {"num_helper_slots": 2, "min_group_size": 1},
    {"min_group_size": 2, "copy_rule": "sami"},
    {"min_routes": 40},
    {"gain_threshold": 5000},
    {"num_helper_slots": 0},
]
OPTIONS = {"num_helper_slots": "--slots"}


def skewed(ranks=8, experts=32, seed=0):
    rng = np.random.default_rng(seed)
    means = np.geomspace(200, 3, experts)[rng.permutation(experts)]
    return rng.poisson(means, (ranks, experts))


@pytest.fixture
def counts_file(tmp_path):
    path = tmp_path / "counts.npy"
    np.save(path, skewed())
    return path


def explained(capsys, *args):
    assert main(["plan", *map(str, args), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


@pytest.mark.parametrize("knobs", KNOBS)
def test_json_is_the_plan_of_the_numpy_twin(counts_file, capsys, knobs):
    options = [
        word
        for name, value in knobs.items()
        for word in (OPTIONS.get(name, "--" + name.replace("_", "-")), value)
    ]
    result, _ = explained(capsys, counts_file, *options)
    counts = skewed()
    plan = plan_counts(counts, **knobs)
    levels = group_levels(8, knobs.get("min_group_size", 4))
    assert set(result) == {
        *("target", "load_before", "load", "imbalance_before", "imbalance", "broadcasts", "flow")
    }
    assert result["target"] == -(-counts.sum() // 8)
    assert result["load_before"] == plan.load_before.tolist()
    assert result["load"] == plan.load.tolist()
    assert result["imbalance"] == pytest.approx(plan.load.max() / plan.load.mean())
    assert len(result["broadcasts"]) == plan.num_broadcasts
    assert (plan.num_broadcasts > 0) == (
        knobs.get("num_helper_slots") != 0 and "gain_threshold" not in knobs
    )
    for shown, row, quota in zip(result["broadcasts"], plan.broadcasts, plan.quota, strict=False):
        names = ("expert", "owner", "level", "group", "slot")
        assert [shown[name] for name in names] == row[:5].tolist()
        assert shown["how"] == HOW[row[5]]
        assert shown["members"] == list(levels[row[2]].members(row[3]))
        hosts = {*shown["members"], shown["owner"]}
        assert {int(rank) for rank in shown["quota"]} == hosts
        assert all(quota[int(rank)] == routes for rank, routes in shown["quota"].items())
        assert sum(shown["quota"].values()) == counts[:, shown["expert"]].sum()
    flow = np.array(result["flow"])
    assert flow.sum(1).tolist() == counts.sum(1).tolist()
    assert flow.sum(0).tolist() == result["load"]


def test_names_of_the_ways_to_copy():
    assert set(COPY_RULES) == {"per_slot", "owner_direct", "sami"}
    assert HOW == ("owner_direct", "sami", "resident")


def test_csv_and_npy_read_alike(counts_file, tmp_path, capsys):
    csv = tmp_path / "counts.csv"
    np.savetxt(csv, skewed(), fmt="%d", delimiter=",")
    assert explained(capsys, csv) == explained(capsys, counts_file)


def test_resident_experts_are_not_copied_again(counts_file, tmp_path, capsys):
    first, _ = explained(capsys, counts_file)
    held = np.full((8, 4), -1)
    for row in first["broadcasts"]:
        held[row["members"], row["slot"]] = row["expert"]
    np.save(tmp_path / "held.npy", held)
    again, _ = explained(capsys, counts_file, "--resident", tmp_path / "held.npy")
    assert again["broadcasts"]
    assert {row["how"] for row in again["broadcasts"]} == {"resident"}
    assert again["flow"] == first["flow"]


def test_picture_shows_loads_broadcasts_and_flow(tmp_path, capsys):
    path = tmp_path / "counts.csv"
    path.write_text("90,10,10,10\n" * 4)
    assert main(["plan", str(path), "--min-group-size", "1"]) == 0
    out = capsys.readouterr().out
    assert "R, max over mean: 3.000 before, 1.000 after" in out
    lines = out.splitlines()
    before = next(line for line in lines if line.startswith("rank  0"))
    after = lines[lines.index(before) + 1]
    assert (before.count("░"), after.count("█")) == (40, round(40 / 3))
    assert "1 broadcast, in placement order" in out
    assert "owner_direct" in out


def test_a_balanced_matrix_plans_nothing(tmp_path, capsys):
    path = tmp_path / "counts.npy"
    np.save(path, np.full((4, 8), 7))
    result, err = explained(capsys, path)
    assert result["broadcasts"] == []
    assert result["imbalance_before"] == result["imbalance"] == 1
    assert "nothing is copied" in err


def test_no_routes_at_all(tmp_path, capsys):
    path = tmp_path / "counts.npy"
    np.save(path, np.zeros((4, 8), int))
    result, _ = explained(capsys, path)
    assert (result["target"], result["load"], result["imbalance"]) == (0, [0] * 4, 1)


def test_many_ranks_fit_a_screen(tmp_path, capsys):
    path = tmp_path / "counts.npy"
    np.save(path, skewed(32, 64))
    assert main(["plan", str(path)]) == 0
    assert "the four largest flows of each" in capsys.readouterr().out


@pytest.fixture
def trace_file(tmp_path):
    """A trace of routes, its counts by layer for 4 ranks, in two chunks of 8 tokens/rank."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.gumbel(size=(64, 3, 16)) + np.linspace(0, 3, 16))[..., :2]
    ids[:, 0] = -1  # a dense layer
    source = np.arange(64) % 4
    np.savez(tmp_path / "trace.npz", topk_ids=ids, source_rank=source, num_experts=np.int32(16))
    chunk = np.arange(64) // 4 // 8
    return tmp_path / "trace.npz", [
        [
            np.stack(
                [
                    np.bincount(ids[(source == r) & (chunk == i), layer].ravel(), minlength=16)
                    for r in range(4)
                ]
            )
            for layer in (1, 2)
        ]
        for i in range(2)
    ]


@pytest.mark.parametrize(("layer", "iteration"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_a_call_of_a_trace_is_planned(trace_file, tmp_path, capsys, layer, iteration):
    path, counts = trace_file
    options = ["--layer", layer, "--iteration", iteration, "--tokens-per-rank", 8, "--ep", 4]
    found, err = explained(capsys, path, *options, "--min-group-size", 1)
    np.save(tmp_path / "counts.npy", counts[iteration][layer])
    expected, _ = explained(capsys, tmp_path / "counts.npy", "--min-group-size", 1)
    assert found == expected
    assert f"trace: layer {layer} of 2, iteration {iteration} of 2, EP4" in err
    assert "1 layers without a route left out" in err


def test_arrays_of_routes_are_traces(trace_file, tmp_path, capsys):
    path, _ = trace_file
    arrays = np.load(path)
    np.save(
        tmp_path / "routed.npy",
        arrays["topk_ids"][np.argsort(arrays["source_rank"], kind="stable")],
    )
    npz, _ = explained(capsys, path, "--ep", 4)
    npy, _ = explained(capsys, tmp_path / "routed.npy", "--ep", 4, "--num-experts", 16)
    assert npz == npy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "16 experts do not divide over 3"),
        (["--ep", 4, "--layer", 2], "--layer 2 is not below its 2 layers"),
        (["--ep", 4, "--iteration", 1], "--iteration 1 is not below its 1 iterations"),
        (["--ep", 4, "--num-experts", 8], "as --num-experts says"),
    ],
)
def test_calls_that_a_trace_lacks(trace_file, capsys, options, words):
    options = options or ["--ep", 3]
    assert main(["plan", str(trace_file[0]), *map(str, options)]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert words in err


def test_folders_of_several_traces_name_them(trace_file, capsys):
    path, _ = trace_file
    (path.parent / "other.npz").write_bytes(path.read_bytes())
    assert main(["plan", str(path.parent)]) == 2
    assert "holds 2 traces" in capsys.readouterr().err


def test_options_of_traces_do_not_go_with_counts(counts_file, capsys):
    assert main(["plan", str(counts_file), "--layer", "1", "--ep", "8"]) == 2
    assert "--ep, --layer choose a call of a trace" in capsys.readouterr().err


BAD = {
    "floats.npy": (np.ones((4, 8)), ["float64", "(4, 8)"]),
    "flat.npy": (np.ones(8, int), ["(8,)"]),
    "odd.npy": (np.ones((3, 8), int), ["num_experts=8", "3 ranks"]),
    "negative.npy": (np.full((4, 8), -2), ["-2"]),
    "pickle.npy": (np.array([[{}]], object), ["pickle.npy"]),
    "wide.npy": (np.ones((1, 1025), int), ["num_experts=1025"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_counts_are_one_clear_line(tmp_path, capsys, name):
    array, words = BAD[name]
    np.save(tmp_path / name, array, allow_pickle=True)
    assert main(["plan", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert all(word in err for word in words), err


def test_an_archive_by_another_name_is_one_clear_line(tmp_path, capsys):
    (tmp_path / "x.npy").write_bytes(b"PK\x03\x04 and nothing")
    assert main(["plan", str(tmp_path / "x.npy")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("content", ["", "1,2\n3\n", "1.5,2\n", "a,b\n"])
def test_bad_csv_is_one_clear_line(tmp_path, capsys, content):
    path = tmp_path / "counts.csv"
    path.write_text(content)
    assert main(["plan", str(path)]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "counts.csv" in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("1,2\n3\n", "line 2: found 1 numbers, expected 2 as in the first; a line is a rank"),
        ("#e0,e1\n1.5,2\n", "line 2: invalid literal for int() with base 10: '1.5'"),
        (f"{2**70},2\n", "does not hold integers: Python int too large"),
    ],
)
def test_bad_csv_names_the_line(tmp_path, capsys, content, words):
    path = tmp_path / "counts.csv"
    path.write_text(content)
    assert main(["plan", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_bad_residents_are_named(counts_file, tmp_path, capsys):
    path = tmp_path / "held.npy"
    for held, words in (
        (np.zeros((8, 3), int), "has shape (8, 3), expected (ranks, num_helper_slots) = (8, 4)"),
        (np.full((8, 4), 99), "ranges from 99 to 99"),
        (np.zeros((8, 4)), "float64 of shape (8, 4), expected integers [ranks, slots]"),
    ):
        np.save(path, held)
        assert main(["plan", str(counts_file), "--resident", str(path)]) == 2
        err = capsys.readouterr().err
        assert f"error: {path}" in err
        assert words in err


@pytest.mark.parametrize("args", [[], ["x.txt"], ["missing.npy"], ["x.npy", "--slots", "-1"]])
def test_bad_usage_exits_with_2(capsys, args):
    with pytest.raises(SystemExit) as stop:
        sys.exit(main(["plan", *args]))
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
