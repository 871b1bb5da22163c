"""The layer on one GPU beside what else computes it: one EP8 rank's share of DeepSeek-V4-Pro.

    python3 benchmarks/cuda/bench_baselines.py                 # every arm; a JSON object a line
    python3 benchmarks/cuda/bench_baselines.py --arms dense torch --tokens 8192

The layer: rows gathered by expert, grouped gate and up, SwiGLU, grouped down, weighted sum over k.
48 experts, top 6, bf16; routing even, or skewed by a power law of the expert's place (0.4).

  dense       torch's bf16 and fp8 products; the best of bf16 is what `of_dense` is against
  jax_iser    start and fused_moe on a Domain of one rank, nothing copied; its plan is timed too
  torch       torch's grouped_mm; gather, SwiGLU and combine in Triton
  pallas      jax's ragged_dot_mgpu; gather, SwiGLU and combine by XLA, one program
  tokamax     the same with tokamax's ragged_dot; skipped where it is not installed
  ragged_dot  the same with lax.ragged_dot; one case, few repeats

All but jax_iser get the order of rows for nothing. Each arm chooses among its own settings, is
compared on some tokens with the layer in f32, and is timed then: medians of 20. torch: CUDA events
around calls that queue up. jax: batches of calls enqueued back to back, so that launches hide
behind the GPU's work, by the host's clock. `tflops` counts 6 D I of every row. Each arm is a
process with a time limit; one that cannot run says why in its line.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

NUM_REPEATS, NUM_WARM_UPS, NUM_CHECKED = 20, 3, 16
BATCH_MS = 40.0  # of jax's calls between two looks at the clock
EXPONENTS = {"even": 0.0, "skewed": 0.4}
TOLERANCE = 2e-2  # of a token's norm; roundings of gate, up, h and rows to bf16 give 5e-3
FP8_TOLERANCE = 2e-2  # the tensor cores' sums of fp8 products keep 14 bits
LIMITS_S = {
    "dense": 25,
    "jax_iser": 35,
    "torch": 35,
    "pallas": 45,
    "tokamax": 40,
    "ragged_dot": 30,
}
parsed = argparse.Namespace()


class Problem(NamedTuple):
    """Routes of one call; rows are in expert order."""

    routing: str
    ids: np.ndarray  # [tokens, top_k] i32
    weights: np.ndarray  # [tokens, top_k] f32
    row_tokens: np.ndarray  # [rows] i32: the token of each row
    places: np.ndarray  # [tokens, top_k] i32: the row of each route
    group_sizes: np.ndarray  # [experts] i32

    @property
    def checked(self) -> np.ndarray:
        """Tokens that are compared with f32."""
        return np.unique(np.linspace(0, len(self.ids) - 1, NUM_CHECKED).astype(np.int32))


def draw(tokens: int, routing: str) -> Problem:
    """As bench_fused_moe draws: experts in turn, or each token's without replacement."""
    rng, shape = np.random.default_rng(1), (tokens, parsed.top_k)
    if EXPONENTS[routing] == 0:
        ids = np.arange(tokens * parsed.top_k).reshape(shape) % parsed.experts
    else:
        log_weights = -EXPONENTS[routing] * np.log(np.arange(parsed.experts) + 1.0)
        keys = log_weights + rng.gumbel(size=(tokens, parsed.experts))
        ids = np.argsort(-keys, axis=1)[:, : parsed.top_k]
    order = np.argsort(ids.ravel(), kind="stable")
    places = np.empty(ids.size, np.int32)
    places[order] = np.arange(ids.size)
    weights = rng.random(shape, np.float32) + 0.5
    return Problem(
        routing,
        ids.astype(np.int32),
        weights / weights.sum(1, keepdims=True),
        (order // parsed.top_k).astype(np.int32),
        places.reshape(shape),
        np.bincount(ids.ravel(), minlength=parsed.experts).astype(np.int32),
    )


def problems() -> list[Problem]:
    return [draw(tokens, routing) for tokens in parsed.tokens for routing in EXPONENTS]


def say(arm: str, **fields) -> None:
    print(json.dumps({"bench": "baselines", "arm": arm, **fields}), flush=True)


def say_layer(arm: str, problem: Problem, ms: float, error: float, **fields) -> None:
    rows = problem.ids.size
    tflops = 6.0 * rows * parsed.hidden * parsed.intermediate / ms / 1e9
    say(
        arm,
        routing=problem.routing,
        tokens=len(problem.ids),
        rows=rows,
        ms=round(ms, 4),
        tflops=round(tflops, 1),
        of_dense=round(tflops / parsed.best_dense, 3) if parsed.best_dense else None,
        error=float(f"{error:.2g}"),
        **fields,
    )


def worst_error(found: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> float:
    """The largest relative distance of a row; raises where it is not small."""
    found = found.astype(np.float64)
    error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    worst = float(np.max(np.where(np.isfinite(error), error, np.inf)))
    if not worst <= tolerance:
        raise SystemExit(f"row {error.argmax()} is off by {worst:.3g} of its norm")
    return worst


def is_over(share: float) -> bool:
    """Whether that share of the arm's time is gone."""
    return time.monotonic() - parsed.begin > share * parsed.limit_s


# torch


def time_host(call, repeats) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def time_torch(call, repeats=NUM_REPEATS) -> float:
    """Median ms of calls that queue up behind each other."""
    import torch

    if parsed.device == "cpu":  # to try the script
        return time_host(call, repeats)
    events = []
    for _ in range(NUM_WARM_UPS + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events[NUM_WARM_UPS:])


def check_product(a, b, found, tolerance) -> float:
    rows = slice(0, len(a), max(1, len(a) // NUM_CHECKED))
    expected = a[rows].float().double() @ b.float().double()
    return worst_error(found[rows].float().cpu().numpy(), expected.cpu().numpy(), tolerance)


def say_dense(kind, m, n, k, a, b, product, tolerance) -> float:
    error = check_product(a, b, product(), tolerance)
    ms = time_torch(product)
    tflops = 2.0 * m * n * k / ms / 1e9
    fields = {"ms": round(ms, 4), "tflops": round(tflops, 1), "error": float(f"{error:.2g}")}
    say("dense", kind=kind, m=m, n=n, k=k, **fields)
    return tflops


def fp8_scales(m, n, k):
    """Arguments of _scaled_mm by kind of scale; all scales are 1."""
    import torch

    def ones(*shape):
        return torch.ones(*shape, device=parsed.device)

    one, blocks = ones(()), math.ceil(k / 128)
    by_row = {"scale_a": ones(m, 1), "scale_b": ones(1, n)}
    slim = ones(blocks, m).t()
    return {
        "a tensor": {"scale_a": one, "scale_b": one},
        "a tensor, fast sums": {"scale_a": one, "scale_b": one, "use_fast_accum": True},
        "a row": by_row,
        "a row, fast sums": by_row | {"use_fast_accum": True},
        "1x128 and 128x128": {
            "scale_a": slim,
            "scale_b": ones(math.ceil(n / 128), blocks).t(),
        },
        "1x128": {"scale_a": slim, "scale_b": ones(blocks, n)},
    }


def run_dense() -> None:
    import torch

    rows, hidden, inner = max(parsed.tokens) * parsed.top_k, parsed.hidden, parsed.intermediate
    square = parsed.square
    shapes = [(square,) * 3, (rows, inner, hidden), (rows, 2 * inner, hidden)]
    for m, n, k in [*shapes, (rows, hidden, inner)]:
        a = torch.randn(m, k, device=parsed.device, dtype=torch.bfloat16)
        b = torch.randn(n, k, device=parsed.device, dtype=torch.bfloat16).t()
        say_dense("bf16", m, n, k, a, b, functools.partial(torch.mm, a, b), TOLERANCE)
    m = n = k = square
    a, b = (
        torch.randn(square, square, device=parsed.device).to(torch.float8_e4m3fn) for _ in range(2)
    )
    for scales, options in fp8_scales(m, n, k).items():
        product = functools.partial(torch._scaled_mm, a, b.t(), out_dtype=torch.bfloat16, **options)
        try:
            say_dense(f"e4m3, a scale {scales}", m, n, k, a, b.t(), product, FP8_TOLERANCE)
        except (RuntimeError, ValueError, TypeError, SystemExit) as error:
            say("dense", kind=f"e4m3, a scale {scales}", skipped=str(error).splitlines()[0][:300])


@functools.cache
def triton_kernels():
    import triton
    import triton.language as tl

    @triton.jit
    def gather(x, row_tokens, rows, width, BLOCK: tl.constexpr):  # noqa: N803
        row = tl.program_id(0).to(tl.int64)
        token = tl.load(row_tokens + row).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = at < width
        tl.store(rows + row * width + at, tl.load(x + token * width + at, mask), mask)

    @triton.jit
    def swiglu(gate, up, stride, h, width, BLOCK: tl.constexpr):  # noqa: N803
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = at < width
        g = tl.load(gate + row * stride + at, mask).to(tl.float32)
        u = tl.load(up + row * stride + at, mask).to(tl.float32)
        value = g / (1 + tl.exp(-g)) * u
        tl.store(h + row * width + at, value.to(h.dtype.element_ty), mask)

    @triton.jit
    def combine(rows, places, weights, y, width, K: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
        token = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = at < width
        total = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(K):
            place = tl.load(places + token * K + k).to(tl.int64)
            weight = tl.load(weights + token * K + k)
            total += weight * tl.load(rows + place * width + at, mask).to(tl.float32)
        tl.store(y + token * width + at, total.to(y.dtype.element_ty), mask)

    return gather, swiglu, combine


class TorchLayer:
    """The layer by torch's grouped_mm; weights in both layouts, `up` both joined and split."""

    def __init__(self):
        import torch

        self.torch = torch
        self.grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
        experts, hidden, inner = parsed.experts, parsed.hidden, parsed.intermediate
        make = functools.partial(torch.randn, device=parsed.device, dtype=torch.bfloat16)
        up = make(experts, 2 * inner, hidden) * hidden**-0.5
        down = make(experts, hidden, inner) * inner**-0.5
        self.inner_last = {"up": up.mT, "down": down.mT}  # as [E, N, K] in memory
        self.outer_last = {name: w.contiguous() for name, w in self.inner_last.items()}
        self.x = make(max(parsed.tokens), hidden)

    def place(self, problem: Problem) -> None:
        torch = self.torch
        move = functools.partial(torch.tensor, device=parsed.device)
        tokens, rows = len(problem.ids), problem.ids.size
        self.problem, self.input = problem, self.x[:tokens]
        self.row_tokens, self.places = move(problem.row_tokens), move(problem.places)
        self.weights = move(problem.weights)
        self.offsets = move(np.cumsum(problem.group_sizes).astype(np.int32))
        empty = functools.partial(torch.empty, device=parsed.device, dtype=torch.bfloat16)
        self.rows, self.h = empty(rows, parsed.hidden), empty(rows, parsed.intermediate)
        self.y = empty(tokens, parsed.hidden)

    def product(self, name, rows, layout, joined=True):
        w = (self.inner_last if layout == "[E, N, K]" else self.outer_last)[name]
        if joined:
            return self.grouped_mm(rows, w, offs=self.offsets)
        halves = w.chunk(2, dim=2)
        return [self.grouped_mm(rows, half, offs=self.offsets) for half in halves]

    def gather(self, block):
        hidden, grid = parsed.hidden, (len(self.rows), math.ceil(parsed.hidden / block))
        triton_kernels()[0][grid](self.input, self.row_tokens, self.rows, hidden, BLOCK=block)

    def swiglu(self, products, block):
        inner = parsed.intermediate
        if isinstance(products, list):
            gate, up = products
        else:
            gate, up = products.chunk(2, dim=1)
        grid = (len(self.h), math.ceil(inner / block))
        triton_kernels()[1][grid](gate, up, gate.stride(0), self.h, inner, BLOCK=block)

    def combine(self, rows, block):
        grid = (len(self.y), math.ceil(parsed.hidden / block))
        triton_kernels()[2][grid](
            rows, self.places, self.weights, self.y, parsed.hidden, K=parsed.top_k, BLOCK=block
        )

    def __call__(self, up, down, gather, swiglu, combine):
        self.gather(gather)
        self.swiglu(self.product("up", self.rows, **up), swiglu)
        self.combine(self.product("down", self.h, **down), combine)

    def check(self) -> float:
        """Against f32, h rounded as every arm rounds it."""
        checked = self.problem.checked
        expected = []
        for token in checked.tolist():
            total = 0
            for e, weight in zip(
                self.problem.ids[token].tolist(), self.problem.weights[token].tolist(), strict=True
            ):
                inner = self.input[token].float() @ self.inner_last["up"][e].float()
                gate, up = inner.chunk(2)
                h = (self.torch.nn.functional.silu(gate) * up).bfloat16().float()
                total = total + weight * (h @ self.inner_last["down"][e].float())
            expected.append(total.cpu().numpy())
        return worst_error(self.y[checked].float().cpu().numpy(), np.stack(expected))


def best_of(calls: dict) -> tuple:
    """The quickest's key and ms; what cannot run is left out."""
    times, why = {}, None
    for key, call in calls.items():
        try:
            times[key] = time_torch(call, repeats=5)
        except (RuntimeError, ValueError) as error:
            why = error
    if not times:
        raise why
    best = min(times, key=times.get)
    return best, times[best]


def tune_torch(layer: TorchLayer) -> tuple[dict, dict]:
    """Settings of the layer's parts, and their ms."""
    layouts, blocks = ("[E, N, K]", "[E, K, N]"), (512, 1024, 2048, 4096)
    settings, parts = {}, {}

    def choose(name, calls, kwargs=lambda key: key):
        best, ms = best_of(calls)
        settings[name], parts[f"{name}_ms"] = kwargs(best), round(ms, 4)

    choose("gather", {b: functools.partial(layer.gather, b) for b in blocks})
    ways = [(layout, joined) for layout in layouts for joined in (True, False)]
    choose(
        "up",
        {way: functools.partial(layer.product, "up", layer.rows, *way) for way in ways},
        lambda way: dict(zip(("layout", "joined"), way, strict=True)),
    )
    products = layer.product("up", layer.rows, **settings["up"])
    choose("swiglu", {b: functools.partial(layer.swiglu, products, b) for b in blocks})
    choose(
        "down",
        {way: functools.partial(layer.product, "down", layer.h, way) for way in layouts},
        lambda layout: {"layout": layout},
    )
    rows = layer.product("down", layer.h, **settings["down"])
    choose("combine", {b: functools.partial(layer.combine, rows, b) for b in blocks})
    return settings, parts


def run_torch() -> None:
    import torch

    torch.manual_seed(0)
    layer = TorchLayer()
    for problem in problems():
        layer.place(problem)
        settings, parts = tune_torch(layer)
        call = functools.partial(layer, **settings)
        layer.y.fill_(math.nan)
        call()
        error = layer.check()
        say_layer("torch", problem, time_torch(call), error, settings=settings, **parts)


# jax


def time_jax(call, repeats=NUM_REPEATS, batch_ms=BATCH_MS) -> float:
    """Median ms of a call, of batches that are enqueued without waiting."""
    import jax

    def seconds(count):
        begin = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - begin) / count

    jax.block_until_ready(call())
    count = max(2, math.ceil(batch_ms / 1e3 / min(seconds(1), seconds(1))))
    return 1e3 * statistics.median(seconds(count) for _ in range(repeats))


@functools.cache
def jax_operands():
    """x of the most tokens, joined gate and up `[E, 2I, D]`, down `[E, D, I]`; bf16."""
    import jax
    import jax.numpy as jnp

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key, shape, scale):
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(scale)

    experts, hidden, inner = parsed.experts, parsed.hidden, parsed.intermediate
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        normal(keys[0], (max(parsed.tokens), hidden), 1.0),
        normal(keys[1], (experts, 2 * inner, hidden), hidden**-0.5),
        normal(keys[2], (experts, hidden, inner), inner**-0.5),
    )


def check_jax(problem: Problem, x, y) -> float:
    """Against f32, h rounded as every arm rounds it."""
    import jax
    import jax.numpy as jnp

    _, up, down = jax_operands()

    @jax.jit
    def of_route(row, e, weight, up, down):
        dot = functools.partial(jnp.matmul, precision="highest")
        gate, other = jnp.split(dot(up[e].astype(jnp.float32), row.astype(jnp.float32)), 2)
        h = (jax.nn.silu(gate) * other).astype(jnp.bfloat16).astype(jnp.float32)
        return weight * dot(down[e].astype(jnp.float32), h)

    expected = [
        sum(
            np.asarray(of_route(x[t], e, w, up, down))
            for e, w in zip(problem.ids[t], problem.weights[t], strict=True)
        )
        for t in problem.checked
    ]
    return worst_error(np.asarray(y[problem.checked], np.float32), np.stack(expected))


def jax_layer(dot_up, dot_down):
    """The layer around two grouped products `dot(rows, weights, group_sizes)`, one program."""
    import jax
    import jax.numpy as jnp

    def layer(x, row_tokens, group_sizes, places, weights, up, down):
        take = functools.partial(jnp.take, axis=0, mode="clip")
        products = dot_up(take(x, row_tokens), up, group_sizes)
        gate, other = (half.astype(jnp.float32) for half in jnp.split(products, 2, axis=1))
        rows = dot_down((jax.nn.silu(gate) * other).astype(x.dtype), down, group_sizes)
        total = 0.0
        for k in range(parsed.top_k):
            total += weights[:, k, None] * take(rows, places[:, k]).astype(jnp.float32)
        return total.astype(x.dtype)

    return jax.jit(layer)


class GroupedDot(NamedTuple):
    """One way to a grouped product: `setting` of `call(rows, weights, group_sizes)`."""

    setting: dict
    call: object
    is_transposed: bool  # weights are [E, N, K], else [E, K, N]


@functools.cache
def jax_weights(name: str, is_transposed: bool):
    import jax
    import jax.numpy as jnp

    weights = jax_operands()[1 if name == "up" else 2]
    return weights if is_transposed else jax.jit(lambda w: jnp.swapaxes(w, 1, 2))(weights)


def compile_all(dots: dict[str, list[GroupedDot]], sizes: dict) -> dict:
    """Programs of every product, by (tokens, name, index); those that fail or are late are out.

    Each has run once, since kernels may be compiled by then only.
    """
    import jax

    programs, why = {}, []

    def compile_one(tokens, name, index):
        if is_over(0.5):
            raise TimeoutError("no time left")
        dot, (rows, group_sizes) = dots[name][index], sizes[tokens, name]
        operands = (rows, jax_weights(name, dot.is_transposed), group_sizes)
        program = jax.jit(dot.call).lower(*operands).compile()
        jax.block_until_ready(program(*operands))
        programs[tokens, name, index] = program

    for name, ways in dots.items():
        for is_transposed in {way.is_transposed for way in ways}:
            jax.block_until_ready(jax_weights(name, is_transposed))
    # Sizes take turns, so that each has settings when time is over.
    jobs = [
        (tokens, name, index)
        for index in range(max(map(len, dots.values())))
        for tokens in parsed.tokens
        for name in dots
        if index < len(dots[name])
    ]
    with ThreadPoolExecutor(parsed.threads) as pool:
        for job, future in [(job, pool.submit(compile_one, *job)) for job in jobs]:
            try:
                future.result()
            except Exception as error:
                why.append(f"{dots[job[1]][job[2]].setting}: {str(error).strip()[:200]}")
    for tokens in parsed.tokens:
        for name in dots:
            if not any((tokens, name) == key[:2] for key in programs):
                raise SystemExit(f"no setting of {name} for {tokens} tokens runs: {why[:3]}")
    return programs


def tune_jax(dots, given: dict[int, list[Problem]]) -> dict:
    """By tokens: the settings of up and down that take least over both routings, and their ms."""
    import jax.numpy as jnp

    x = jax_operands()[0]
    sizes = {}
    for tokens, cases in given.items():
        rows = jnp.take(x, cases[0].row_tokens, axis=0)
        group_sizes = jnp.asarray(cases[0].group_sizes)
        sizes[tokens, "up"] = (rows, group_sizes)
        sizes[tokens, "down"] = (rows[:, : parsed.intermediate], group_sizes)
    programs = compile_all(dots, sizes)
    best = {}
    for (tokens, name, index), program in programs.items():
        dot, rows = dots[name][index], sizes[tokens, name][0]
        weights, ms = jax_weights(name, dot.is_transposed), []
        if is_over(0.75) and (tokens, name) in best:
            continue
        for case in given[tokens]:
            call = functools.partial(program, rows, weights, jnp.asarray(case.group_sizes))
            ms.append(time_jax(call, repeats=2, batch_ms=10.0))
        if (tokens, name) not in best or sum(ms) < sum(best[tokens, name][1]):
            best[tokens, name] = dot, ms
    tried = {key[:2]: sum(key[:2] == other[:2] for other in programs) for key in programs}
    return {key: (*value, tried[key]) for key, value in best.items()}


def run_dots(arm: str, dots: dict[str, list[GroupedDot]]) -> None:
    """Tunes both products, then times the layer with the best."""
    import jax.numpy as jnp

    given = {tokens: [draw(tokens, routing) for routing in EXPONENTS] for tokens in parsed.tokens}
    best = tune_jax(dots, given)
    for tokens, cases in given.items():
        (up, up_ms, tried), (down, down_ms, _) = best[tokens, "up"], best[tokens, "down"]
        layer = jax_layer(up.call, down.call)
        weights = (jax_weights("up", up.is_transposed), jax_weights("down", down.is_transposed))
        for index, case in enumerate(cases):
            x = jax_operands()[0][:tokens]
            arrays = (case.row_tokens, case.group_sizes, case.places, case.weights)
            call = functools.partial(layer, x, *map(jnp.asarray, arrays), *weights)
            error = check_jax(case, x, call())
            say_layer(
                arm,
                case,
                time_jax(call),
                error,
                settings={"up": up.setting, "down": down.setting},
                settings_tried=tried,
                up_ms=round(up_ms[index], 4),
                down_ms=round(down_ms[index], 4),
            )


def run_pallas() -> None:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    # block_m, block_n, max_concurrent_steps, grid_block_n; the likely ones first
    blocks = [
        (128, 128, 5, 8),
        (64, 128, 6, 8),
        (128, 256, 3, 4),
        (64, 256, 4, 4),
        (128, 192, 4, 8),
        (128, 128, 5, 1),
        (64, 128, 6, 1),
        (192, 128, 4, 8),
        (128, 128, 5, 4),
    ]
    names = ("block_m", "block_n", "max_concurrent_steps", "grid_block_n")
    dots = {"up": [], "down": []}
    widths = {"up": 2 * parsed.intermediate, "down": parsed.hidden}
    for name, width in widths.items():
        for is_transposed in (True, False):
            for block in blocks if is_transposed else blocks[:2]:
                if width % (block[1] * block[3]):
                    continue
                setting = dict(zip(names, block, strict=True)) | {
                    "block_k": 64,
                    "transpose_rhs": is_transposed,
                }
                dots[name].append(
                    GroupedDot(setting, pallas_dot(ragged_dot_mgpu, setting), is_transposed)
                )
    run_dots("pallas", dots)


def pallas_dot(module, setting):
    return lambda rows, weights, sizes: module.ragged_dot(
        rows, weights, group_sizes=sizes, **setting
    )


def import_tokamax():
    """tokamax's kernel for GPUs; its profiler need not be there."""
    import types

    try:
        import xprof.cli.tools  # noqa: F401
    except ImportError:
        for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["xprof.cli.tools"].get_kernel_stats_tool = None
    from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu, pallas_mosaic_gpu_common

    return pallas_mosaic_gpu.PallasMosaicGpuRaggedDot, pallas_mosaic_gpu_common


def run_tokamax() -> None:
    try:
        make_op, common = import_tokamax()
    except ImportError as error:
        raise SystemExit(f"tokamax cannot be imported: {error}") from error
    # block_m, block_n, block_k, num_stages, persistent, minor dimension, tile width
    blocks = [
        (128, 128, 64, 4, True, "M", 8),
        (64, 128, 64, 4, True, "M", 8),
        (128, 64, 128, 4, True, "M", 8),
        (64, 64, 128, 4, True, "M", 8),
        (128, 128, 128, 2, True, "M", 8),
        (128, 128, 64, 5, True, "M", 8),
        (128, 128, 64, 4, True, "N", 8),
        (128, 128, 64, 4, False, "M", 8),
        (64, 128, 64, 6, True, "M", 4),
        (64, 128, 128, 2, True, "M", 8),
    ]
    names = ("block_m", "block_n", "block_k", "num_stages", "persistent", "grid_minor_dim")
    dots = []
    for block in blocks:
        setting = dict(zip((*names, "grid_tile_width"), block, strict=True))
        minor = common.MatmulDimension[setting["grid_minor_dim"]]
        config = common.Config(split_k=1, **setting | {"grid_minor_dim": minor})
        dots.append(GroupedDot(setting, tokamax_dot(make_op(config=config)), False))
    run_dots("tokamax", {"up": dots, "down": dots})


def tokamax_dot(op):
    return lambda rows, weights, sizes: op(rows, weights, group_sizes=sizes)


def run_ragged_dot() -> None:
    """One case: a call takes half a second."""
    import jax
    import jax.numpy as jnp

    problem = draw(max(parsed.tokens), "even")
    layer = jax_layer(jax.lax.ragged_dot, jax.lax.ragged_dot)
    x, weights = jax_operands()[0], (jax_weights("up", False), jax_weights("down", False))
    arrays = (problem.row_tokens, problem.group_sizes, problem.places, problem.weights)
    call = functools.partial(layer, x, *map(jnp.asarray, arrays), *weights)
    error = check_jax(problem, x, call())
    say_layer("ragged_dot", problem, time_jax(call, repeats=3), error, settings={}, repeats=3)


def run_jax_iser() -> None:
    import jax
    from jax.sharding import Mesh

    import jax_iser

    devices = jax.devices()[:1]
    mesh, is_gpu = Mesh(np.array(devices), ("ep",)), devices[0].platform != "cpu"
    _, joined, down = jax_operands()
    halves = jax.jit(lambda w: (w[:, : parsed.intermediate], w[:, parsed.intermediate :]))(joined)
    weights = jax_iser.ExpertWeights(*halves, down)
    for tokens in parsed.tokens:
        cases = [draw(tokens, routing) for routing in EXPONENTS]
        best: dict[str, tuple] = {}
        for copy_sms in parsed.copy_sms if is_gpu else [None]:
            with jax_iser.Domain(
                mesh,
                "ep",
                num_experts=parsed.experts,
                top_k=parsed.top_k,
                hidden_size=parsed.hidden,
                intermediate_size=parsed.intermediate,
                max_tokens_per_rank=tokens,
                num_helper_slots=1,
                min_group_size=1,
                dtype="bfloat16",
                copy_sms=copy_sms,
                timeout_s=20.0,
            ) as domain:
                for case in cases:
                    found = time_iser(mesh, domain, case, weights)
                    kept = best.get(case.routing)
                    if kept is None or found[0] < kept[0]:
                        best[case.routing] = (*found, copy_sms)
        for case in cases:
            ms, error, device_ms, copy_sms = best[case.routing]
            setting = {"copy_sms": copy_sms}
            say_layer("jax_iser", case, ms, error, settings=setting, device_ms=round(device_ms, 4))


def time_iser(mesh, domain, problem: Problem, weights) -> tuple[float, float, float]:
    """ms, error, and ms from the start of a call to its end by the GPU's clock."""
    import jax
    from jax.sharding import PartitionSpec as P

    import jax_iser

    spec = P("ep")

    # x passes through and is donated, so that start need not copy it: in a model it is a product.
    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(spec,) * 5,
        out_specs=(spec, spec, P()),
        check_vma=False,
    )
    def layer(x, ids, topk_weights, weights, handle):
        ticket, x = jax_iser.start(x, ids, weights, handle, balance="none")
        y, plan = jax_iser.fused_moe(x, topk_weights, weights, ticket)
        return y, x, plan.status

    x = jax_operands()[0][: len(problem.ids)] * 1  # its own, to be given away
    ids, topk_weights = jax.device_put((problem.ids, problem.weights))
    state = [x]

    def call():
        y, state[0], status = layer(state[0], ids, topk_weights, weights, domain.handle)
        return y, status

    y, status = call()
    if int(status):
        domain.check()
    error = check_jax(problem, state[0], y)
    ms = time_jax(call)
    jax.block_until_ready(state)
    domain.check()
    rows = domain.timelines()[-NUM_REPEATS:]
    return ms, error, statistics.median(row.finished - row.started for row in rows) / 1e6


# the arms' processes

ARMS = {
    "dense": run_dense,
    "jax_iser": run_jax_iser,
    "torch": run_torch,
    "pallas": run_pallas,
    "tokamax": run_tokamax,
    "ragged_dot": run_ragged_dot,
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    add("--tokens", type=int, nargs="+", default=[8192, 2048, 512])
    add("--experts", type=int, default=48)
    add("--top-k", type=int, default=6)
    add("--hidden", type=int, default=7168)
    add("--intermediate", type=int, default=3072)
    add("--square", type=int, default=8192, help="of the dense product m = n = k")
    add("--copy-sms", type=int, nargs="+", default=[1, 8], help="settings of jax_iser")
    add("--threads", type=int, default=8, help="that compile")
    add("--device", default="cuda", help="of torch")
    add("--limit-s", type=float, default=None, help="of an arm (default: its own)")
    add("--all-limit-s", type=float, default=150, help="no arm is begun after this")
    add("--arm", choices=ARMS, help=argparse.SUPPRESS)  # run in this process
    add("--best-dense", type=float, default=0.0, help="TFLOP/s that of_dense is against")
    return parser.parse_args(namespace=parsed)


def run_arm(arm: str, limit_s: float, best_dense: float) -> list[dict]:
    """The lines of an arm in a process of its own, which says why there are none."""
    command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
    command += ["--limit-s", str(limit_s), "--best-dense", str(best_dense)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"over {limit_s:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith("{")]
        errors = [line for line in err.read().splitlines() if line.strip()]
    for line in lines:
        print(line, flush=True)
    if code != 0:
        why = errors[-1][:400] if errors else ""
        say(arm, skipped=f"{why} (exit {code})" if isinstance(code, int) else f"{code}: {why}")
        print(*errors[-15:], sep="\n", file=sys.stderr, flush=True)
    return [json.loads(line) for line in lines]


def main():
    arguments()
    if parsed.arm:
        parsed.limit_s = parsed.limit_s or LIMITS_S[parsed.arm]
        parsed.begin = time.monotonic()
        ARMS[parsed.arm]()
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    begin, best_dense = time.monotonic(), parsed.best_dense
    for arm in parsed.arms:
        left = parsed.all_limit_s - (time.monotonic() - begin)
        if left < 10:
            say(arm, skipped="no time left")
            continue
        started = time.monotonic()
        rows = run_arm(arm, min(parsed.limit_s or LIMITS_S[arm], left), best_dense)
        dense = [row["tflops"] for row in rows if row.get("kind") == "bf16"]
        best_dense = max([best_dense, *dense])
        print(f"{arm}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
