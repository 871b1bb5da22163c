"""The replay, synth, roofline and broadcast commands: output, exit codes, errors of one line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_iser.cli import main

ROOT = Path(__file__).parents[2]
SMALL = ["--layers", "2", "--experts", "96", "--top-k", "2", "--tokens-per-rank", "64"]


def run(capsys, *argv):
    """Exit code, standard output and standard error of a command."""
    try:
        code = main(list(argv))
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def test_replay_json_is_pure(capsys):
    code, out, err = run(
        capsys, "replay", "synthetic:mixed", *SMALL, "--ep", "4,5,8", "--iterations", "2",
        "--policy", "none,haloq:min_group_size=1", "--slots", "2,4", "--json", "-",
    )  # fmt: skip
    assert code == 0
    result = json.loads(out)
    assert len(result["rows"]) == 2 * 2 * 2
    row = result["rows"][1]
    assert (row["trace"], row["ep"], row["slots"]) == ("synthetic:mixed", 4, 2)
    assert (row["policy"], row["min_group_size"]) == ("haloq:min_group_size=1", 1)
    assert (row["iterations"], row["layers"], row["tokens_per_rank"]) == (2, 2, 64)
    assert "96 experts do not divide over 5" in result["skipped"][0]
    assert "do not divide" in err


def test_replay_says_what_it_assumed(capsys, npz):
    code, out, err = run(capsys, "replay", str(npz()), "--ep", "2,4")
    assert code == 0
    assert "cannot fill one chunk of 8192 tokens/rank at EP4: replayed at 5" in err.replace(
        "\n", " "
    )
    assert "trace, mean over iterations" in out


def test_replay_costs(capsys, tmp_path):
    points = tmp_path / "points.json"
    points.write_text("[[1, 1564], [2, 2615]]")
    for option in (["--time-fit", "513,1051"], ["--time-points", str(points)]):
        code, out, _ = run(
            capsys, "replay", "workload:W2", *SMALL, "--ep", "4", "--iterations", "1",
            "--expert-bytes", "1000000", *option, "--json", "-",
        )  # fmt: skip
        assert code == 0
        none, haloq = json.loads(out)["rows"]
        assert none["layer_us"] == pytest.approx(513 + 1051 * none["imbalance"])
        assert haloq["layer_us"] < haloq["layer_us_off"] == pytest.approx(none["layer_us"])
        assert haloq["remote_mb"] == pytest.approx(haloq["remote_copies"])


def test_replay_plots(capsys, tmp_path):
    code, _, _ = run(
        capsys, "replay", "workload:W1", "workload:W2", *SMALL, "--ep", "4,8", "--iterations", "2",
        "--policy", "none,haloq,p2p", "--plot", str(tmp_path / "figures"),
    )  # fmt: skip
    assert code == 0
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    wanted = (
        "imbalance_without_balancing",
        "expert_popularity",
        "busiest_owner_copies",
        "haloq_objectives",
    )
    assert names == {f"{name}.png" for name in wanted}


def test_plots_leave_out_what_was_not_replayed(capsys, tmp_path):
    np.save(tmp_path / "few.npy", np.ones((3, 2, 2), np.int16))
    traces = [str(tmp_path / "few.npy"), *(f"workload:W{i}" for i in range(1, 6))]
    code, _, err = run(
        capsys, "replay", *traces, *SMALL, "--ep", "4", "--iterations", "1",
        "--num-experts", "8", "--plot", str(tmp_path / "figures"),
    )  # fmt: skip
    assert code == 0, err
    assert "popularity is drawn without few, workload:W5" in " ".join(err.split())
    assert (tmp_path / "figures" / "expert_popularity.png").exists()


def test_synth_then_replay(capsys, tmp_path):
    out_file = str(tmp_path / "w3.npz")
    made = ["workload:W3", *SMALL, "--ep", "4"]
    code, out, _ = run(capsys, "synth", *made, "--out", out_file, "--json", "-")
    assert code == 0
    assert json.loads(out)["tokens"] == 2 * 4 * 64
    code, out, _ = run(capsys, "replay", out_file, *made, "--iterations", "2", "--json", "-")
    rows = json.loads(out)["rows"]
    assert rows[1]["imbalance_off"] == pytest.approx(rows[3]["imbalance_off"])
    assert rows[1]["imbalance"] == pytest.approx(rows[3]["imbalance"])


def test_roofline(capsys, tmp_path):
    code, out, _ = run(capsys, "roofline", "--json", "-", "--plot", str(tmp_path))
    assert code == 0
    result = json.loads(out)
    assert len(result["scenarios"]) == 64
    assert set(result["scenarios"][0]) == {
        "device", "model", "tokens_per_rank", "copies", "shared", "ratio", "line", "above",
    }  # fmt: skip
    assert round(result["routed_us"], 1) == 432.9
    assert (tmp_path / "math_over_communication.png").stat().st_size > 10_000


def test_roofline_of_ones_own(capsys):
    code, out, _ = run(
        capsys, "roofline", "--device", "H200:1.979:450:2", "--model", "mine:4096:2048:8:1:4096:48",
        "--tokens-per-rank", "4096", "--copies", "0,3", "--json", "-",
    )  # fmt: skip
    assert code == 0
    rows = json.loads(out)["scenarios"]
    assert [(r["device"], r["copies"], r["shared"]) for r in rows] == [
        ("H200", 0, False), ("H200", 3, False), ("H200", 0, True), ("H200", 3, True),
    ]  # fmt: skip


def test_broadcast(capsys, tmp_path):
    code, out, _ = run(
        capsys, "broadcast", "--groups", "4,16", "--json", "-", "--plot", str(tmp_path)
    )
    assert code == 0
    assert round(json.loads(out)["rows"][1]["ring_gbps"]) == 250
    assert (tmp_path / "broadcast_bandwidth.png").exists()


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["replay"], 2, "TRACE"),
        (["replay", "nothing.npz"], 2, "does not exist"),
        (["replay", "synthetic:other"], 2, "not one of mixed, gsm8k, uniform"),
        (["replay", "workload:W8"], 2, "not one of W0"),
        (["replay", "workload:W0", "--ep", "x"], 2, "not an integer"),
        (["replay", "workload:W0", "--ep", "0"], 2, "below 1"),
        (["replay", "workload:W0", "--slots", "17"], 2, "above 16"),
        (["replay", "workload:W0", "--policy", "best"], 2, "not one of none"),
        (["replay", "workload:W0", "--policy", "haloq:x=1"], 2, "no setting"),
        (["replay", "workload:W0", "--min-group-size", "3"], 2, "invalid choice: 3"),
        (["replay", "workload:W0", "--time-fit", "1"], 2, "A,B"),
        (["replay", "workload:W0", "--json", "/nowhere/x.json"], 2, "does not exist"),
        (["replay", "workload:W0", "--experts", "32", "--ep", "5"], 2, "nothing was replayed"),
        (["replay", "synthetic:mixed", "--experts", "32"], 2, "at least"),
        (
            ["synth", "synthetic:mixed", "--experts", "32", "--out", "x.npz"],
            2,
            "--experts 32 is too",
        ),
        (["replay", "workload:W0", "--num-experts", "64"], 2, "--num-experts 64 is of recorded"),
        (
            ["replay", "workload:W0", "--policy", "none,p2p", "--min-group-size", "2"],
            2,
            "--min-group-size 2 has no policy to go to: none of none, p2p takes it",
        ),
        (
            ["replay", "workload:W0", "--policy", "haloq:min_routes=3", "--min-routes", "2"],
            2,
            "--min-routes 2 has no policy to go to",
        ),
        (
            ["replay", "workload:W0", "--policy", "haloq-owner", "--gain-threshold", "2"],
            2,
            "--gain-threshold 2 has no policy to go to",
        ),
        (
            ["replay", "workload:W0", "--policy", "eplb-past:interval=0"],
            2,
            "interval=0 is outside 1",
        ),
        (["replay", "workload:W0", "--policy", "eplb-past:window=-1"], 2, "window=-1 is outside 0"),
        (["replay", "workload:W0", "--policy", "p2p:copies_per_owner=-1"], 2, "is outside 0"),
        (["replay", "workload:W0", "--policy", "p2p:slots=17"], 2, "slots=17 is outside 0 to 16"),
        (["replay", "workload:W0", "--policy", "lplb:sweeps=-1"], 2, "sweeps=-1 is outside 0"),
        (
            ["replay", "workload:W0", "--policy", "haloq:resident=2"],
            2,
            "resident=2 is outside 0 to 1",
        ),
        (
            ["replay", "workload:W0", "--policy", "haloq:min_routes=-1"],
            2,
            "min_routes=-1 is outside",
        ),
        (["replay", "workload:W0", "--policy", "haloq:copy_rule=x"], 2, "copy_rule='x' is not one"),
        (["replay", "workload:W0", "--policy", "haloq:min_group_size=3"], 2, "not one of 1, 2, 4"),
        (["replay", "workload:W0", "--policy", "haloq-owner:owner_only=2"], 2, "outside 0 to 1"),
        (["replay", "e[/y].npz"], 2, "trace e[/y].npz does not exist"),
        (["synth", "workload:[/y]", "--out", "x.npz"], 2, "workload '[/y]' is not one of W0"),
        (["broadcast", "--expert-bytes", "9" * 400], 2, "is above"),
        (["roofline", "--device", "a:1e-300:1:1"], 2, "outside 1e-6 to 1e9"),
        (["roofline", "--device", "a:nan:1:1"], 2, "outside 1e-6 to 1e9"),
        (["synth", "mixed", "--out", "x.npz"], 2, "does not start with"),
        (["synth", "workload:W0", "--out", "x.pt"], 2, "does not end in .npz"),
        (["replay", "workload:W0", "--experts", "16", "--top-k", "20"], 2, "--top-k 20 exceeds"),
        (
            ["replay", "workload:W0", "--plot", "/dev/null/x"],
            2,
            "--plot /dev/null/x cannot be made",
        ),
        (["roofline", "--plot", "/dev/null/x"], 2, "--plot /dev/null/x cannot be made"),
        (["broadcast", "--plot", "/dev/null/x"], 2, "--plot /dev/null/x cannot be made"),
        (["roofline", "--device", "a:b:c:d"], 2, "--device"),
        (["roofline", "--device", "a"], 2, "found 1 fields, expected 4: NAME:PFLOPS:GBPS:WEIGHT"),
        (["roofline", "--model", "a:1:2"], 2, "found 3 fields, expected 6 or 7: NAME:WIDTH:I:K"),
        (["broadcast", "--groups", "1"], 2, "below 2"),
    ],
)
def test_errors_are_one_line(capsys, argv, code, message):
    found, out, err = run(capsys, *argv)
    assert found == code
    assert message in err
    assert len([line for line in err.splitlines() if "error" in line]) == 1
    assert not out


def test_a_broken_trace_is_bad_input(capsys, npz):
    code, _, err = run(capsys, "replay", str(npz(topk_ids=np.zeros((2, 2)))))
    assert code == 2
    assert "topk_ids: found float64 of shape (2, 2); expected integers" in err


def test_sizes_of_made_up_traces_do_not_go_with_recorded_ones(capsys, npz):
    code, _, err = run(capsys, "replay", str(npz()), "--layers", "2", "--top-k", "2", "--ep", "2")
    assert code == 2
    assert "--layers, --top-k size made-up traces" in err
    assert run(capsys, "replay", str(npz()), "--ep", "2", "--iterations", "1")[0] == 0


def test_experts_that_a_token_names_twice_are_told(capsys, npz):
    ids = np.tile(np.array([[0, 1], [2, 3], [-1, -1]], np.int8), (40, 1, 1))
    code, _, err = run(capsys, "replay", str(npz(topk_ids=ids)), "--ep", "2,4")
    assert (code, "twice" in err) == (0, False)
    ids[5, 1] = 3
    code, _, err = run(capsys, "replay", str(npz(topk_ids=ids)), "--ep", "2,4")
    assert code == 0
    assert " ".join(err.split()).count("1 of the first 40 tokens name an expert twice") == 1


def test_names_with_brackets_are_names(capsys, npz, tmp_path):
    """Names are printed as they are: brackets are no markup of the terminal."""
    (tmp_path / "e[").mkdir()
    path = npz("e[/y].npz")  # a folder, and a file whose name closes a bracket
    code, out, err = run(capsys, "replay", str(path), "--ep", "2")
    assert code == 0, err
    assert "y], mean over iterations" in out
    assert "y]: " in err
    argv = ["--device", "[/a]:1:2:3", "--model", "[b]:64:64:2:1:64", "--plot", str(tmp_path)]
    code, out, _ = run(capsys, "roofline", *argv)
    assert code == 0
    assert "[/a]" in out
    assert "[b]" in out


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["roofline"], ["DeepSeek-V4-Pro", "tokens/rank", "with shared"]),
        (["broadcast"], ["scatter + all-gather", "one port (measured)"]),
        (
            ["replay", "workload:W1", *SMALL, "--ep", "4", "--policy", "haloq:min_group_size=1"],
            ["haloq:min_group_size=1", "owner p50/99/max", "plans/s"],
        ),
    ],
)
def test_tables_cut_nothing_on_a_narrow_terminal(capsys, monkeypatch, argv, names):
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert all(name in out for name in names)
    assert "…" not in out


def test_help_explains_every_column(capsys):
    _, out, _ = run(capsys, "replay", "--help")
    _, table, _ = run(
        capsys, "replay", "workload:W2", *SMALL, "--ep", "4", "--iterations", "1",
        "--time-fit", "1,2",
    )  # fmt: skip
    heads = next(line for line in table.splitlines() if "plans/s" in line)
    explained = out.partition("columns")[2].partition("\n\n")[0]
    for head in re.split(r"\s{2,}", heads.strip()):
        assert re.search(rf"(^|[ ,]){re.escape(head)}[ ,]", explained, re.MULTILINE), head


def test_a_policy_with_slots_of_its_own_is_one_row(capsys):
    code, out, _ = run(
        capsys, "replay", "workload:W2", *SMALL, "--ep", "4", "--iterations", "1",
        "--policy", "haloq:slots=3,haloq,haloq", "--slots", "2,2,4", "--json", "-",
    )  # fmt: skip
    assert code == 0
    rows = json.loads(out)["rows"]
    assert [(row["policy"], row["slots"]) for row in rows] == [
        ("haloq:slots=3", 3), ("haloq", 2), ("haloq", 4),
    ]  # fmt: skip
    assert rows[0]["slots_used_max"] == 3


def test_chunks_of_recorded_counts_are_refused(capsys, tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"logical_count": [[1, 2, 3, 4]]}')
    code, _, err = run(capsys, "replay", str(path), "--ep", "2", "--tokens-per-rank", "8")
    assert (code, "--tokens-per-rank 8 cuts no trace" in err) == (2, True)
    assert run(capsys, "replay", str(path), "--ep", "2")[0] == 0


def test_an_ep_degree_without_tokens_is_skipped(capsys, tmp_path):
    np.save(tmp_path / "few.npy", np.ones((3, 2, 2), np.int16))
    argv = [str(tmp_path / "few.npy"), "--num-experts", "8", "--json", "-"]
    code, out, _ = run(capsys, "replay", *argv, "--ep", "2,4")
    assert code == 0
    assert json.loads(out)["skipped"] == ["EP4 skipped: few has fewer tokens than 4 ranks"]
    assert run(capsys, "replay", *argv, "--ep", "4")[0] == 2


def test_one_rank_sends_nothing(capsys, tmp_path):
    argv = ["roofline", "--ep", "1", "--copies", "0,2", "--plot", str(tmp_path)]
    code, out, _ = run(capsys, *argv, "--json", "-")
    assert code == 0
    rows = json.loads(out)["scenarios"]
    assert {row["ratio"] is None for row in rows if not row["copies"]} == {True}
    assert {row["ratio"] is None for row in rows if row["copies"]} == {False}
    assert "no traffic" in run(capsys, *argv)[1]


# Policies of one's own


def replay_with(capsys, tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    policies = f"none,{path}"
    argv = ["workload:W1", *SMALL, "--ep", "4", "--iterations", "2", "--policy", policies]
    return run(capsys, "replay", *argv, "--json", "-")


def documented_policy():
    text = (ROOT / "docs" / "replay.md").read_text()
    return text.split("```python\n", 1)[1].split("```", 1)[0]


def test_the_documented_policy_runs(capsys, tmp_path):
    code, out, err = replay_with(capsys, tmp_path, documented_policy())
    assert code == 0, err
    none, mine = json.loads(out)["rows"]
    assert mine["policy"] == "hottest"
    assert mine["imbalance"] < none["imbalance"]
    assert mine["remote_copies"] == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("return Outcome(", "return None\n        Outcome("), "plan answered NoneType, expected"),
        (("return Outcome(", "return ...\n        Outcome("), "plan answered ellipsis, expected"),
        (("import numpy as np", "import numpy as"), "SyntaxError: "),
        (("import numpy as np", "import nump"), "No module named 'nump'"),
        (("plan=plan,", "plan=plan[::-1],"), "not in ascending order"),
        (("quota=quota,", "quota=quota[:, :2],"), "quota: int32 of shape ("),
        (("quota=quota,", "quota=2 * quota,"), "do not sum to the routes of their experts"),
        (("load=loads_of", "load=1 + loads_of"), "load: not that of its quota"),
        (("routes = batch.totals", "routes = batch.loads"), "has no attribute 'loads'"),
        (
            ("    name =", "    needs_totals = True\n    fit = None\n    name ="),
            "fit raised TypeError",
        ),
        (
            ("    name =", "    def __post_init__(self):\n        1 / 0\n\n    name ="),
            "Hottest raised Zero",
        ),
    ],
)
def test_policies_that_do_not_work_are_one_line(capsys, tmp_path, change, words):
    text = documented_policy()
    assert change[0] in text
    code, out, err = replay_with(capsys, tmp_path, text.replace(*change, 1))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"policy file {tmp_path / 'mine.py'}" in err
    assert words in err


@pytest.mark.parametrize("command", ["replay", "synth", "roofline", "broadcast"])
def test_help_shows_an_example(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"example:\n  jax-iser {command} " in out


def test_policies_and_planner_do_not_need_jax():
    """The planner's module, which everything here leans on, must not be what imports jax."""
    code = "from jax_iser.plan import counts; print('jax' in vars(counts))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
