"""Which matrix product computes the experts on a CPU: bits first, then speed.

    python benchmarks/bench_gemm.py --json benchmarks/results/gemm_cpu.json

For each instruction set of this CPU, in a process of its own:

- *bits*: one row at every position of tiles of every height; how many different results it has. The
  layer's contract allows one (docs/gemm.md).
- *speed*: the expert's products (gate and up as one, then down) for tiles of some heights on two
  threads, a tile each, beside NumPy's best two-threaded dense rate. All contenders take turns in
  short slices; a ratio is the median of the rounds' ratios, since other work on the machine slows
  a whole round. Rates are by the wall's clock and, for when cores are shared with other work, by
  the process's CPU time, half of it a thread.
- *expert*: the whole kernel of ffi/cpu/gemm.h (with silu, rounding, gather and scatter), f32 and
  bf16.

Needs a C++ compiler; candidates that are not installed are skipped
(Debian: libeigen3-dev, libdnnl-dev, libxsmm-dev).
"""

import argparse
import ctypes
import functools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import _report
import gemm_candidates as candidates
import numpy as np

NUM_THREADS = 2
NUM_EXPERTS = 8  # more than fits in a usual L3 cache
TILES_AN_EXPERT = 4  # in a row, as in a layer
SETTLE_SECONDS = 0.1  # OpenBLAS's threads spin for a while after a product, on a core of the next

Slice = Callable[[], float]  # does some work, returns its floating-point operations


def bits_of_heights(candidate: candidates.Candidate, n: int, k: int, heights: range) -> list[set]:
    """For each height, the results that one row has over all positions of the tile."""
    random = np.random.default_rng(0)
    row = random.standard_normal(k, np.float32)
    w = candidate.place(random.standard_normal((n, k), np.float32))
    results = []
    for height in heights:
        x, out = np.tile(row, (height, 1)), np.full((height, n), np.nan, np.float32)
        out = np.asarray(candidate.gemm(candidate.place(x), w, out))
        results.append({row.tobytes() for row in out})
    return results


def study_bits(candidate: candidates.Candidate, sizes: tuple[int, int], max_rows: int) -> dict:
    """Distinct results of one row, and the heights at which all positions give the same."""
    hidden, intermediate = sizes
    heights = range(1, max_rows + 1)
    gate_up = bits_of_heights(candidate, 2 * intermediate, hidden, heights)
    down = bits_of_heights(candidate, hidden, intermediate, heights)
    pairs = list(zip(heights, gate_up, down, strict=True))
    stable = [height for height, a, b in pairs if len(a) == len(b) == 1]
    return {
        "results_of_a_row": [len(set().union(*gate_up)), len(set().union(*down))],
        "heights_where_position_matters": len(heights) - len(stable),
        "stable_heights": ranges_of(stable),
    }


def ranges_of(numbers: list[int]) -> str:
    """`[1, 2, 3, 7]` -> `1-3 7`."""
    words, start = [], None
    for number in numbers:
        start = number if start is None else start
        if number + 1 not in numbers:
            words.append(str(start) if start == number else f"{start}-{number}")
            start = None
    return " ".join(words)


def values(*shape: int, dtype: str = "f32") -> np.ndarray:
    """Random numbers about 1/10; bf16 as the upper halves of f32."""
    random = np.random.default_rng(0).standard_normal(shape, np.float32) / 10
    return random if dtype == "f32" else (random.view(np.uint32) >> 16).astype(np.uint16)


def on_threads(pool: ThreadPoolExecutor, work: Callable[[int], None]) -> None:
    list(pool.map(work, range(NUM_THREADS)))


def product_slice(
    pool: ThreadPoolExecutor,
    candidate: candidates.Candidate,
    weights: list[tuple[np.ndarray, np.ndarray]],
    rows: int,
) -> Slice:
    """Gate and up as one product, then down, for tiles of `rows` rows, the experts shared out."""
    placed = [tuple(map(candidate.place, planes)) for planes in weights]
    (two_intermediate, hidden), intermediate = weights[0][0].shape, weights[0][1].shape[1]
    x = candidate.place(values(rows, hidden))
    h = candidate.place(values(rows, intermediate))

    def work(thread: int) -> None:
        out = np.empty((rows, two_intermediate), np.float32), np.empty((rows, hidden), np.float32)
        for gate_up, down in placed[thread::NUM_THREADS]:
            for _ in range(TILES_AN_EXPERT):
                candidate.gemm(x, gate_up, out[0])
                candidate.gemm(h, down, out[1])

    def run() -> float:
        on_threads(pool, work)
        return 6.0 * hidden * intermediate * rows * len(weights) * TILES_AN_EXPERT

    return run


def expert_slice(
    pool: ThreadPoolExecutor, library: ctypes.CDLL, sizes: tuple[int, int], rows: int, dtype: str
) -> Slice:
    """The whole kernel on the same tiles."""
    hidden, intermediate = sizes
    code = {"f32": 0, "bf16": 1}[dtype]
    planes = [values(3, hidden * intermediate, dtype=dtype) for _ in range(NUM_EXPERTS)]

    def addresses(array: np.ndarray) -> ctypes.Array:
        return (ctypes.c_void_p * rows)(*(row.ctypes.data for row in array))

    def work(thread: int) -> None:
        x = values(rows, hidden, dtype=dtype)
        y = np.empty_like(x)
        x_rows, y_rows = addresses(x), addresses(y)
        for expert in planes[thread::NUM_THREADS]:
            weights = [ctypes.c_void_p(plane.ctypes.data) for plane in expert]
            for _ in range(TILES_AN_EXPERT):
                library.expert(rows, hidden, intermediate, code, x_rows, *weights, y_rows)

    def run() -> float:
        on_threads(pool, work)
        return 6.0 * hidden * intermediate * rows * NUM_EXPERTS * TILES_AN_EXPERT

    return run


def dense_slice(m: int, n: int, k: int) -> Slice:
    """NumPy's product on as many threads, which are its own."""
    a, b = values(m, k), values(k, n)
    out = np.empty((m, n), np.float32)

    def run() -> float:
        np.matmul(a, b, out=out)
        return 2.0 * m * n * k

    return run


class Rates(NamedTuple):
    """GFLOP/s in each round, by the clock on the wall and by the process's CPU time a thread."""

    wall: list[float]
    cpu: list[float]


def measure(slices: dict[str, Slice], num_rounds: int) -> dict[str, Rates]:
    """All slices in turn, `num_rounds` times after a round that is not counted."""
    rates = {name: Rates([], []) for name in slices}
    for round_ in range(num_rounds + 1):
        for name, run in slices.items():
            time.sleep(SETTLE_SECONDS)
            wall, cpu = time.perf_counter(), time.process_time()
            giga = run() / 1e9
            wall, cpu = time.perf_counter() - wall, (time.process_time() - cpu) / NUM_THREADS
            if round_:
                rates[name].wall.append(giga / wall)
                rates[name].cpu.append(giga / cpu)
    return rates


def against(rates: dict[str, Rates], base: str, names: list[str]) -> dict[str, dict]:
    """Median rates, and the medians of the rounds' ratios to `base`."""
    table: dict[str, dict] = {}
    for name in names:
        table[name] = {}
        for clock, got, other in zip(Rates._fields, rates[name], rates[base], strict=True):
            ratios = [a / b for a, b in zip(got, other, strict=True)]
            table[name][f"gflops_{clock}"] = round(statistics.median(got), 1)
            table[name][f"ratio_{clock}"] = round(statistics.median(ratios), 3)
    return table


def study_speed(
    pool: ThreadPoolExecutor,
    library: ctypes.CDLL,
    contenders: list[candidates.Candidate],
    args: argparse.Namespace,
) -> dict:
    hidden, intermediate = sizes = args.hidden, args.intermediate
    planes = (2 * intermediate, hidden), (hidden, intermediate)
    weights = [tuple(values(*shape) for shape in planes) for _ in range(NUM_EXPERTS)]
    dense = {f"{m}x{n}x{k}": dense_slice(m, n, k) for m, n, k in args.dense}
    products = {
        f"{candidate.name} {rows}": product_slice(pool, candidate, weights, rows)
        for candidate in contenders
        for rows in args.heights
    }
    rows = library.preferred_rows(hidden, intermediate, 0)
    expert = {dtype: expert_slice(pool, library, sizes, rows, dtype) for dtype in ("f32", "bf16")}
    rates = measure(dense | products | expert, args.rounds)
    best = max(dense, key=lambda name: statistics.median(rates[name].cpu))
    return {
        "numpy": against(rates, best, list(dense)),
        "products": against(rates, best, list(products)),
        "expert": {"rows": rows} | against(rates, best, list(expert)),
        "bf16_to_f32": against(rates, "f32", ["bf16"])["bf16"],
    }


def study(isa: str, args: argparse.Namespace) -> dict:
    """Everything about one instruction set; the environment has been set for it."""
    with tempfile.TemporaryDirectory() as folder:
        library = candidates.load_ours(pathlib.Path(folder))
        if candidates.version_of(library) != isa:
            raise SystemExit(f"asked for {isa}, got {candidates.version_of(library)}")
        found, skipped = candidates.load_all(isa, pathlib.Path(folder))
        ours = candidates.Candidate("ours", isa, candidates.as_gemm(library))
        contenders = [ours, *found]
        sizes = args.hidden, args.intermediate
        bits = {
            candidate.name: {"version": candidate.version}
            | study_bits(candidate, sizes, args.max_rows)
            for candidate in contenders
        }
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            speed = study_speed(pool, library, contenders, args)
    return {"isa": isa, "skipped": skipped, "bits": bits, "speed": speed}


def run_child(isa: str) -> dict | None:
    """The study of one instruction set in a process whose environment keeps to it."""
    environment = {**os.environ, **candidates.ISA_ENVIRONMENT[isa], "OMP_NUM_THREADS": "1"}
    environment["OPENBLAS_NUM_THREADS"] = str(NUM_THREADS)
    command = [sys.executable, __file__, *sys.argv[1:], "--child", isa]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{isa}: no result (exit code {done.returncode})", file=sys.stderr)
        return None
    return json.loads(done.stdout)


def print_summary(run: dict) -> None:
    say = functools.partial(print, file=sys.stderr)
    say(f"{run['isa']}, NumPy {run['speed']['numpy']}")
    for name, bits in run["bits"].items():
        say(f"  {name:9} {bits}")
    for name, rates in run["speed"]["products"].items():
        say(f"  {name:13} {rates}")
    say(f"  expert {run['speed']['expert']}\n  bf16/f32 {run['speed']['bf16_to_f32']}")
    say(f"  skipped {run['skipped']}")


def parse() -> argparse.Namespace:
    parser = _report.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    isas = ["avx512", "avx2"] if on_x86 else ["neon"]
    parser.add_argument("--isa", nargs="+", default=isas, choices=["avx512", "avx2", "neon"])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1024)
    parser.add_argument("--heights", type=int, nargs="+", default=[32, 96, 128])
    parser.add_argument("--max-rows", type=int, default=130, help="tallest tile of the bits study")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dense = [(2048, 2048, 2048), (4096, args.intermediate, args.hidden)]
    return args


def main() -> int:
    args = parse()
    if args.child:
        print(json.dumps(study(args.child, args)))
        return 0
    load = os.getloadavg() if hasattr(os, "getloadavg") else ()
    runs = [run for run in map(run_child, args.isa) if run]
    for run in runs:
        print_summary(run)
    sizes = {"hidden": args.hidden, "intermediate": args.intermediate}
    result = {"threads": NUM_THREADS, "experts": NUM_EXPERTS, **sizes, "load_before": load}
    result["runs"] = runs
    _report.write(args, result)
    return 0 if runs else 1


if __name__ == "__main__":
    sys.exit(main())
