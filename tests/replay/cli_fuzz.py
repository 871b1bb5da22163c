"""Random command lines and damaged traces for `jax-iser`: each ends in 0, or in 2 and one line.

    python tests/replay/cli_fuzz.py 120 [FIRST_SEED]    # for so many seconds; prints what failed

Every case is a function of its seed alone.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import recorders

from jax_iser.cli import main

EXPERTS = 8
WRITERS = {
    "per_token": lambda f, ids: recorders.sglang_per_token(f, ids, EXPERTS),
    "per_pass": lambda f, ids: recorders.sglang_per_pass(f, ids, EXPERTS),
    "low_latency": lambda f, ids: recorders.sglang_low_latency(f, ids, EXPERTS),
    "stat": lambda f, ids: recorders.sglang_stat(f, ids, EXPERTS),
    "sglang_jax": lambda f, ids: recorders.sglang_jax(f, ids, EXPERTS),
    "json": lambda f, ids: recorders.json_counts(f, ids, EXPERTS),
    "history": lambda f, ids: recorders.load_history(f, ids, EXPERTS),
    "vllm": recorders.vllm_routed_experts,
    "tensorrt": lambda f, ids: recorders.tensorrt_llm(f, ids, EXPERTS),
    "megatron": recorders.megatron,
    "ours": lambda f, ids: write_ours(f, ids),
}
# Text that takes the place of a value, in files of text and on the command line.
NASTY = [
    *("null", "-1", "0", "1e400", "NaN", "Infinity", "[]", "{}", '"x"', "true", "1.5", "[[]]"),
    *("99999999999999999999999", "-0", "1e-400", '""', "[1]", "4294967296", "2147483648"),
]
WORDS = ["", "0", "-1", "1", "3", "x", "nan", "inf", "1e9", "9" * 30, "[/y]", "1,", ",", "é", "%s"]
POLICIES = [
    *("none", "haloq", "haloq-owner", "all-rank", "p2p", "p2p-capped", "eplb-past", "eplb-whole"),
    *("lplb", "lplb:sweeps=1"),
]
NO_POLICIES = ["nope", "x.py", "haloq:", ":", "haloq:min_routes", "haloq:size=2"]
SETTINGS = [
    *("slots", "min_group_size", "min_routes", "gain_threshold", "copy_rule", "resident"),
    *("owner_only", "choose", "copies_per_owner", "interval", "window", "sweeps", "name"),
]


def write_ours(folder: Path, ids: np.ndarray) -> Path:
    """Our `.npz` with all of its arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    flat = ids.reshape(-1, *ids.shape[3:]).astype(np.int16)
    source = np.repeat(np.tile(np.arange(ids.shape[1]), len(ids)), ids.shape[2])
    arrays = {"request_lengths": [len(flat) - 3, 0, 3], "num_experts": np.int32(EXPERTS)}
    np.savez(folder / "trace.npz", topk_ids=flat, source_rank=source, **arrays)
    return folder


def routed_ids(rng: np.random.Generator) -> np.ndarray:
    """`[passes, ranks, tokens, layers, top_k]`, some layers, ranks and tokens without routes."""
    shape = (rng.integers(1, 4), rng.choice([1, 2, 4]), rng.integers(1, 6), rng.integers(1, 4))
    top_k = int(rng.integers(1, 4))
    ids = np.argsort(rng.gumbel(size=(*shape, EXPERTS)), axis=-1)[..., :top_k].astype(np.int32)
    for axis in range(4):
        if rng.random() < 0.2:
            np.moveaxis(ids, axis, 0)[rng.integers(ids.shape[axis])] = -1
    return ids


def damage(folder: Path, draw: random.Random) -> None:
    """Changes one file of a folder in one way, or leaves all as they are."""
    path = draw.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    kind = draw.choice(["none", "flip", "flip", "cut", "value", "value", "drop", "double", "empty"])
    if kind == "flip" and content:
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
    elif kind == "cut":
        content = content[: draw.randrange(len(content) + 1)]
    elif kind == "value":
        text = content.decode("latin1")
        starts = [i for i, c in enumerate(text) if c.isdigit() and not text[i - 1 : i].isdigit()]
        if starts:
            start = draw.choice(starts)
            end = start + len(text[start:]) - len(text[start:].lstrip("0123456789"))
            content = bytearray((text[:start] + draw.choice(NASTY) + text[end:]).encode("latin1"))
    elif kind == "drop":
        path.unlink()
        return
    elif kind == "double":
        path.with_name("copy" + path.name).write_bytes(content)
    elif kind == "empty":
        content = bytearray()
    path.write_bytes(content)


def trace_of(seed: int, draw: random.Random, folder: Path) -> str:
    """A recorded trace, perhaps damaged; or a made-up one; or something that is none."""
    if draw.random() < 0.12:
        made = ["synthetic:uniform", "workload:W4", "workload:W5", "workload:", "synthetic:[/b]"]
        return draw.choice([*made, "e[/y].npz", "", "/dev/null", str(folder)])
    ids = routed_ids(np.random.default_rng(seed))
    WRITERS[draw.choice(sorted(WRITERS))](folder / "r[x", ids)
    if draw.random() < 0.7:
        damage(folder / "r[x", draw)
    files = sorted((folder / "r[x").iterdir())
    return str(draw.choice([folder / "r[x", *files])) if files else str(folder / "r[x")


def options(draw: random.Random, table: dict[str, list[str]]) -> list[str]:
    """Some options, most of them with a value that fits."""
    words = []
    for name, good in table.items():
        if draw.random() < 0.2:
            words += [name, draw.choice(good if draw.random() < 0.95 else WORDS)]
    return words


def policies(draw: random.Random) -> str:
    """Policies with settings, some of which there are not."""
    chosen = []
    for _ in range(draw.randint(1, 3)):
        name = draw.choice(POLICIES if draw.random() < 0.95 else NO_POLICIES)
        for _ in range(draw.choice([0, 0, 0, 1])):
            value = draw.choice(["0", "1", "2", "4", "3", "-1", "sami", "rank", *WORDS])
            name += f":{draw.choice(SETTINGS)}={value}"
        chosen.append(name)
    return ",".join(chosen)


SIZES = {"--layers": ["1", "2"], "--experts": ["8", "16", "7"], "--top-k": ["1", "2", "9"]}
CUTS = {"--ep": ["1", "2", "4", "3", "2,4", "8"], "--tokens-per-rank": ["1", "4", "64"]}


def make_argv(seed: int, folder: Path) -> list[str]:
    """The command line of a seed; what it reads is written to a folder."""
    draw = random.Random(seed)
    command = draw.choice(["replay"] * 6 + ["plan"] * 3 + ["synth", "roofline", "broadcast"])
    json_to = ["--json", draw.choice(["-"] * 6 + [str(folder / "out.json"), "/nowhere/x"])]
    end = json_to if draw.random() < 0.7 else []
    if command == "replay":
        made = ["--layers", "2", "--experts", "16", "--top-k", "2", "--tokens-per-rank", "16"]
        knobs = {"--min-group-size": ["1", "2"], "--min-routes": ["2"], "--gain-threshold": ["9"]}
        fits = {"--time-fit": ["1,2"]}
        table = CUTS | knobs | fits | {
            "--slots": ["0", "2", "1,3"],
            "--iterations": ["1", "2"],
            "--expert-bytes": ["1000"],
            "--threads": ["1", "2"],
            "--policy": [policies(draw)] * 3,
        }  # fmt: skip
        trace = trace_of(seed, draw, folder)
        small = made if ":" in trace else []
        needs = ["--num-experts", str(EXPERTS)] if draw.random() < 0.9 and not small else []
        needs += ["--ep", "2,4"] if draw.random() < 0.8 else []
        end += ["--plot", str(folder / "figures")] if draw.random() < 0.03 else []
        return [command, trace, *needs, *small, *options(draw, table), *end]
    if command == "plan":
        table = CUTS | {"--layer": ["0", "1"], "--iteration": ["0", "1"], "--slots": ["2"]}
        needs = ["--num-experts", str(EXPERTS)] if draw.random() < 0.9 else []
        return [command, trace_of(seed, draw, folder), *needs, *options(draw, table), *end]
    if command == "synth":
        name = draw.choice(["workload:W1", "workload:W5", "synthetic:uniform", "synthetic:mixed"])
        out = draw.choice([str(folder / "a.npz"), str(folder / "a.pt"), str(folder), "/nowhere/a"])
        small = ["--tokens-per-rank", "8", "--layers", "1", "--experts", "16", "--ep", "4"]
        return [command, name, "--out", out, *small, *options(draw, SIZES), *end]
    if command == "roofline":
        number = lambda: draw.choice(["1", "2.5", "0", "1e3", "64", *WORDS])  # noqa: E731
        table = {
            "--device": [":".join(["d[/x]", *(number() for _ in range(3))])],
            "--model": [":".join(["m", *(number() for _ in range(draw.choice([5, 5, 6, 4])))])],
            "--ep": ["1", "4", "1024"],
            "--copies": ["0", "0,1"],
            "--slots": ["0", "16"],
            "--tokens-per-rank": ["1", "4096"],
        }
        return [command, *options(draw, table), *end]
    table = {
        "--groups": ["2", "4,16", "1024"],
        "--expert-bytes": ["1", "1000"],
        "--link-gbps": ["0.001", "450"],
        "--latency-us": ["0", "5"],
        "--slice-bytes": ["1", "4096"],
    }
    return [command, *options(draw, table), *end]


def why_bad(argv: list[str]) -> str | None:
    """Why a command ends as it must not, or None."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        return traceback.format_exc()
    lines = err.getvalue().splitlines()
    if code not in (0, 2):
        return f"exit code {code}: {lines}"
    if code == 2 and (out.getvalue() or len([line for line in lines if "error: " in line]) != 1):
        return f"not one line: {lines}, {out.getvalue()[:200]!r}"
    if code == 0 and "--json" in argv and argv[argv.index("--json") + 1] == "-":
        json.loads(out.getvalue(), parse_constant=lambda name: 1 / 0)
    return None


def check(seed: int) -> str | None:
    """What is wrong with a seed's case, and the line that reproduces it; None if it is right."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("error")
        argv = make_argv(seed, Path(name))
        reason = why_bad(argv)
    command = f'python -c "import cli_fuzz; print(cli_fuzz.check({seed}))"  # in tests/replay'
    return reason and f"{command}\njax-iser {' '.join(map(repr, argv))}\n{reason}"


if __name__ == "__main__":
    end, tried, failed = time.monotonic() + float(sys.argv[1]), 0, 0
    for seed in itertools.count(int(sys.argv[2]) if len(sys.argv) > 2 else 0):
        if time.monotonic() > end:
            break
        tried += 1
        if found := check(seed):
            failed += 1
            print(found, flush=True)
    print(f"{tried} command lines, {failed} of them wrong")
    sys.exit(bool(failed))
