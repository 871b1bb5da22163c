"""Tables of what GPUs measured: docs/performance.md. Unfavourable arms come first."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from markdown import markdown, percent, span, span_percent

# As the page calls the arms of bench_fused_moe.
ARMS = {
    "off": "OFF",
    "installed": "ON, replicas already there",
    "included": "ON, plan, copies and READY included",
    "balanced": "balanced routing, OFF",
    "balanced, on": "balanced routing, ON, nothing to copy",
    "balanced, included": "balanced routing, ON, all included",
    "uniform": "uniform routing by chance, OFF",
}


def _groups(rows: list[dict]) -> list[list[dict]]:
    """Rows of the runs in a list: each begins with its first OFF."""
    starts = [
        i for i, row in enumerate(rows) if row["arm"] == "off" and (i == 0 or _is_last(rows, i))
    ]
    return [rows[a:b] for a, b in zip(starts, [*starts[1:], len(rows)], strict=True)]


def _is_last(rows: list[dict], i: int) -> bool:
    return rows[i - 1]["arm"] == "uniform"


def _times(run: list[dict], *arms: str) -> list[float]:
    return [row["ms"] for row in run if row["arm"] in arms]


def _arms_rows(run: list[dict], skewed: float) -> list[list[object]]:
    """A row for each arm, slowest first: `skewed` is R of the run's routing."""
    off, balanced = (_times(run, arm) for arm in ("off", "balanced"))
    rows = []
    for row in sorted(run, key=lambda row: -row["ms"]):
        rows.append(
            [
                f"R = {skewed:.3f}",
                ARMS[row["arm"]],
                f"{row['imbalance']:.3f} to {row['imbalance_after']:.3f}",
                f"{row['ms']:.3f}",
                span_percent([row["ms"] / ms - 1 for ms in off], 1, "+"),
                span_percent([row["ms"] / ms - 1 for ms in balanced], 1, "+"),
            ]
        )
    return rows


ARMS_HEAD = ["run", "arm", "R before to after", "ms", "against OFF", "against balanced routing"]


def pair(document: dict) -> str:
    """EP2 on two GPUs: every arm; then what balancing cost where there was something to copy."""
    runs = sorted(_groups(document["pair"]), key=lambda run: -run[0]["imbalance"])
    rows = [row for run in runs for row in _arms_rows(run, run[0]["imbalance"])]
    lines = [markdown(ARMS_HEAD, rows), ""]
    for run in runs:
        included, off = _times(run, "included")[0], _times(run, "off")
        after = next(row for row in run if row["arm"] == "included")["imbalance_after"]
        what = "copied replicas" if run[0]["imbalance"] > after + 0.001 else "had nothing to copy"
        lines.append(
            f"- At R = {run[0]['imbalance']:.3f} ON with all included {what} and took "
            f"{included:.3f} ms, where OFF took {span(off, '.3f')} ms and balanced routing "
            f"{_times(run, 'balanced')[0]:.3f} ms."
        )
    return "\n".join(lines)


def two_gpu_layer(document: dict) -> str:
    """The layer in JAX on two GPUs, OFF and ON side by side, smallest gain first."""
    off = {_setting(row): row for row in document["rows"] if row["case"] == "none"}
    rows = []
    for row in document["rows"]:
        if row["case"] != "haloq":
            continue
        base = off[_setting(row)]
        low, high = row["copy_us_more_quartiles"]
        rows.append(
            (
                row["layer_us"] / base["layer_us"],
                [
                    row["rule"],
                    row["copy_sms"],
                    row["shared_expert_sms"] or "all",
                    f"{base['imbalance']:.2f} to {row['imbalance']:.2f}",
                    f"{base['layer_us'] / 1e3:.2f}",
                    f"{row['layer_us'] / 1e3:.2f}",
                    f"{row['layer_us'] / base['layer_us']:.3f}",
                    f"{row['copy_us_more']:.0f} [{low:.0f}, {high:.0f}]",
                ],
            )
        )
    rows.sort(key=lambda row: -row[0])
    head = ["copy rule", "SMs of the copy", "SMs of the shared expert", "R", "OFF ms", "ON ms"]
    noise = [row["copy_us_more"] for row in document["rows"] if row["case"] == "plain, again"]
    return "\n".join(
        [
            markdown(
                [*head, "ON / OFF", "span grows by, us [quartiles]"], [row[1] for row in rows]
            ),
            "",
            f"The same layer without copies, timed again, differed by {span(noise, '.0f')} us.",
        ]
    )


def _setting(row: dict) -> tuple:
    return row.get("rule"), row.get("copy_sms"), row["shared_expert_sms"]


def dense(document: dict) -> str:
    rows = [
        [f"{row['m']} x {row['n']} x {row['k']}", f"{row['ms']:.3f}", f"{row['tflops']:.0f}"]
        for row in sorted(document["dense"], key=lambda row: row["tflops"])
    ]
    return markdown(["cuBLAS, bf16", "ms", "TFLOP/s"], rows)


MODELS = ("DeepSeek-V4-Pro", "V4-Flash-like", "Qwen3-30B-A3B", "gpt-oss-20b")
SHARE_HEAD = ["share of", "tokens", "groups", "bf16 ms (TFLOP/s)", "no pairs", "tiles of 128"]


def share(document: dict) -> str:
    """One rank's share: every arm of bf16 and FP8."""
    tables = [document["share"], [row for row in document["share_fp8"] if "ms" in row]]
    by = [{(r["model"], r["tokens"], r["arm"]): r for r in table} for table in tables]
    rows = []
    keys = [key for key in by[0] if "," not in key[2]]
    for model, tokens, arm in sorted(
        keys, key=lambda key: (MODELS.index(key[0]), key[1], key[2] == "even")
    ):
        cells = [model, f"{tokens:,}", arm]
        for table, tiles in zip(by, (128, 64), strict=True):
            for suffix in ("", ", no pairs", f", tiles of {tiles}"):
                row = table.get((model, tokens, arm + suffix))
                cells.append(f"{row['ms']:.2f} ({row['tflops']:.0f})" if row else "")
        rows.append(cells)
    return markdown([*SHARE_HEAD, "FP8 ms (TFLOP/s)", "no pairs", "tiles of 64"], rows)


def of_dense(document: dict) -> str:
    """Ranges over sizes and groupings, against the best bf16 product of the same run."""
    rows = [row for row in document["share"] if "," not in row["arm"]]
    table = []
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = [model]
        for tokens in (512, 2048, 8192, 16384):
            mine = [r for r in rows if r["model"] == model and r["tokens"] == tokens]
            cells.append(span_percent([r["of_dense"] for r in mine]))
        table.append(cells)
    best = max(row["tflops"] for row in document["dense"])
    head = ["share of", *(f"{tokens:,} tokens" for tokens in (512, 2048, 8192, 16384))]
    return f"{markdown(head, table)}\n\nThe best product of the run: {best:.0f} TFLOP/s."


NAMES = {
    "jax_iser": "jax_iser in JAX, with plan, start and combine",
    "torch": "torch `grouped_mm`",
    "tokamax": "tokamax",
    "pallas": "Pallas `ragged_dot_mgpu`",
    "ragged_dot": "`lax.ragged_dot`",
}


def baselines(document: dict) -> str:
    found = document["baselines"]
    sizes = [(tokens, routing) for tokens in (8192, 2048, 512) for routing in ("skewed", "even")]
    by = {(r["arm"], r.get("tokens"), r.get("routing")): r for r in found}
    rows = []
    for arm, name in NAMES.items():
        reasons = [r["skipped"].split(":")[0] for r in found if r["arm"] == arm and "skipped" in r]
        missing = f"not timed, {reasons[0]}" if reasons else ""
        cells = [by.get((arm, *size)) for size in sizes]
        rows.append([name, *(f"{row['tflops']:.0f}" if row else missing for row in cells)])
    ratios = [by["jax_iser", *size]["tflops"] / by["torch", *size]["tflops"] for size in sizes]
    head = ["TFLOP/s", *(f"{tokens:,} {routing}" for tokens, routing in sizes)]
    return f"{markdown(head, rows)}\n\njax_iser's rate over torch's: {span(ratios, '.2f')}."


def fp8_dense(document: dict) -> str:
    rows = [
        [row["kind"], f"{row['m']} x {row['n']} x {row['k']}", f"{row['tflops']:,.0f}"]
        for row in document["baselines"]
        if row["arm"] == "dense"
    ]
    return markdown(["dense products of torch", "m x n x k", "TFLOP/s"], rows)


def _ranks(document: dict, group: str, head: str) -> str:
    runs = sorted(_groups(document[group]), key=lambda run: -run[0]["imbalance"])
    rows = []
    for run in runs:
        off, installed, included, balanced = (
            _times(run, arm) for arm in ("off", "installed", "included", "balanced")
        )
        costs = [
            _times(run, arm)[0] / balanced[0] - 1 for arm in ("balanced, included", "balanced, on")
        ]
        rows.append(
            [
                f"{run[0]['imbalance']:.2f}",
                f"{next(r for r in run if r['arm'] == 'included')['imbalance_after']:.2f}",
                span(off, ".2f"),
                *(
                    f"{ms[0]:.2f} ({percent(ms[0] / balanced[0] - 1, 1, '+')})"
                    for ms in (included, installed)
                ),
                f"{balanced[0]:.2f}",
                f"{_times(run, 'uniform')[0]:.2f}",
                *(percent(cost, 1, "+") for cost in costs),
            ]
        )
    columns = ["R off", "R on", "OFF", "ON, all included", "ON, replicas there", "balanced, OFF"]
    more = ["uniform, OFF", "ON costs on balanced routing", "without plan and copy"]
    return markdown([f"{head}: {columns[0]}", *columns[1:], *more], rows)


def ranks_qwen(document: dict) -> str:
    """EP8 as eight ranks of a GPU, and the line through its OFF times."""
    off = [(row["imbalance"], row["ms"]) for row in document["ranks_qwen3"] if row["arm"] == "off"]
    x, y = np.array(off).T
    slope, start = np.polyfit(x, y, 1)
    r = math.floor(1e5 * np.corrcoef(x, y)[0, 1]) / 1e5
    table = _ranks(document, "ranks_qwen3", "Qwen3-30B-A3B")
    return f"{table}\n\nOFF's times lie on {start:.2f} + {slope:.2f} R ms, r = {r:.5f}."


def ranks_gpt_oss(document: dict) -> str:
    return _ranks(document, "ranks_gpt_oss", "gpt-oss-20b")


def parts(document: dict) -> str:
    """Where a call's time goes, at 8,192 tokens."""
    rows = []
    for group, name in (("share", "bf16"), ("share_fp8", "FP8")):
        for row in document[group]:
            if row.get("tokens") != 8192 or "," in row["arm"]:
                continue
            times = [f"{row[f'{part}_us'] / 1e3:.2f}" for part in PARTS]
            shares = [percent(row[key], 1) for key in ("wait_rows", "wait_h", "idle")]
            rows.append(
                [f"{row['model']}, {name}, {row['arm']}", f"{row['ms']:.2f}", *times, *shares]
            )
    waits = ["tiles wait for rows", "for h", "no tile"]
    return markdown(["share of", "ms", *PARTS, *waits], rows)


PARTS = ("dispatch", "schedule", "tiles", "gate", "combine")


def plan_counts(document: dict) -> str:
    rows = []
    for row in document["plan_counts"]:
        times = ("placement", "repair", "placement_and_repair", "with_sums", "kernel", "launch")
        rows.append(
            [
                f"EP{row['ranks']}, S = {row['helper_slots']}",
                row["broadcasts"],
                f"{row['imbalance_before']:.2f} to {row['imbalance_after']:.3f}",
                *(f"{row[f'{name}_us']:.1f}" for name in times),
            ]
        )
    what = ["placement", "repair", "both", "with sums", "kernel", "whole launch"]
    return markdown(["us", "broadcasts", "R", *what], rows)


def plan(document: dict) -> str:
    """The whole op, slowest first."""
    found = document["plan"] + document["plan_gpus"]
    rows = []
    for row in sorted(found, key=lambda row: -row["launch_us"]):
        parts = [row.get(f"{name}_us") for name in PLAN_PARTS]
        rows.append(
            [
                f"EP{row['ranks']} on {row['gpus']} GPU{'s' if row['gpus'] > 1 else ''}",
                row["helper_slots"],
                row["ctas_per_rank"],
                f"{row['last_in_to_last_out_us']:.1f}",
                f"{row['launch_us']:.1f}",
                *("" if part is None else f"{part:.1f}" for part in parts),
            ]
        )
    head = ["us", "S", "CTAs per rank", "last CTA in to last out", "whole launch", *PLAN_PARTS]
    return markdown(head, rows)


PLAN_PARTS = ("histogram", "exchange", "sums", "placement", "repair", "rewrite")
RULES = ("owner_direct", "sami")
BUNDLES = (10.0, 36.0, 126.0, 264.0)
CTAS = (1, 2, 4, 8, 16)


def _ctas(count: int) -> str:
    return "1 CTA" if count == 1 else f"{count} CTAs"


def _one(rows: Sequence[dict], **wanted) -> dict:
    (row,) = (r for r in rows if all(r.get(key) == value for key, value in wanted.items()))
    return row


def copy(document: dict) -> str:
    """Rates of the copy kernel by CTAs, and the best plain copy of the run."""
    sizes, rows = document["sizes"], []
    for bundle in BUNDLES:
        best = _one(sizes, method="plain_best", bundle_mib=bundle)["gbps"]
        peer = _one(sizes, method="cudaMemcpyPeerAsync", bundle_mib=bundle)["gbps"]
        for rule in RULES:
            rates = [
                _one(sizes, method="copy", bundle_mib=bundle, rule=rule, ctas=ctas)["gbps"]
                for ctas in CTAS
            ]
            cells = [f"{rate:.0f}" for rate in (*rates, best, peer)]
            of_best = percent(rates[CTAS.index(8)] / best, 1)
            rows.append([f"{bundle:.0f} MiB, {rule}", *cells, of_best])
    head = ["GB/s", *(_ctas(ctas) for ctas in CTAS), "best plain copy", "cudaMemcpyPeerAsync"]
    return markdown([*head, "8 CTAs / best plain"], rows)


def nccl(document: dict) -> str:
    """The op with READY, 8 CTAs, beside ncclBroadcast in the same process."""
    sizes, rows = document["sizes"], []
    for bundle in BUNDLES:
        for rule in RULES:
            cells = []
            for suffix in ("", "_alone"):
                kind = {"method": f"op{suffix}", "bundle_mib": bundle, "rule": rule, "ctas": 8}
                ours = _one(sizes, **kind)["us"]
                theirs = [
                    row["us"]
                    for row in sizes
                    if (row["method"], row["bundle_mib"]) == (f"ncclBroadcast{suffix}", bundle)
                ]
                cells += [f"{ours:.1f}", span(theirs, ".1f")]
                cells.append(span([us / ours for us in theirs], ".2f"))
            rows.append([f"{bundle:.0f} MiB, {rule}", *cells])
    head = ["us", "ours, back to back", "NCCL", "NCCL / ours", "ours, alone", "NCCL", "NCCL / ours"]
    return markdown(head, rows)


def tune(document: dict) -> str:
    """Slices and stages of the copy's ring, 126 MiB."""
    rows = []
    found = document["tune"]
    for rule in RULES:
        for size, stages in dict.fromkeys((r["slice_bytes"], r["stages"]) for r in found):
            kind = {"rule": rule, "slice_bytes": size, "stages": stages}
            rates = [_one(found, ctas=ctas, **kind)["gbps"] for ctas in (1, 4, 8, 16)]
            cells = [f"{rate:.0f}" for rate in rates]
            rows.append([f"{rule}, {stages} slices of {size // 1024} KiB", *cells])
    return markdown(["GB/s", *(_ctas(ctas) for ctas in (1, 4, 8, 16))], rows)


def beside(document: dict) -> str:
    """Growth of the span that a copy brings to products beside it, all settings, worst first."""
    found = document["beside"]
    kinds = {}
    for row in found:
        if row["order"] in ("copy_first", "gemm_first"):
            kinds.setdefault((row["order"], row["gemm_sms"]), []).append(row)
    order = {"copy_first": "copy first", "gemm_first": "products first"}
    alone = {
        sms: [
            row["growth_us"] for row in found if (row["order"], row["gemm_sms"]) == ("no_copy", sms)
        ]
        for _, sms in kinds
    }
    rows = []
    for (first, sms), mine in kinds.items():
        cells = [span(alone[sms], ".0f")]
        for rule in RULES:
            plain = [r for r in mine if r["rule"] == rule and _is_default(r)]
            cells += [
                "; ".join(_quartiles(row) for row in plain) or "-",
                span([r["growth_us"] for r in mine if r["rule"] == rule], ".0f"),
            ]
        worst = max(row["growth_us"] for row in mine)
        rows.append((worst, [f"{order[first]}, {sms or 'all'} SMs", len(mine), *cells]))
    rows.sort(key=lambda row: -row[0])
    columns = [
        f"{rule}, {what}" for rule in RULES for what in ("8 CTAs [quartiles]", "all settings")
    ]
    head = ["us that the span grows", "settings", "without a copy", *columns]
    return markdown(head, [row[1] for row in rows])


def _is_default(row: dict) -> bool:
    return (row["ctas"], row["slice_bytes"], row["stages"], row["cluster"]) == (8, 16384, 6, 1)


def _quartiles(row: dict) -> str:
    low, high = row["growth_quartiles_us"]
    return f"{row['growth_us']:.0f} [{low:.0f}, {high:.0f}]"


def products(document: dict) -> str:
    """The layer's products beside cuBLAS's at the same shapes; the lowest ratio first."""
    rows = [
        [
            row["model"],
            row["routing"],
            f"{row['tokens']:,}",
            row["against"],
            f"{row['cublas_ms']:.3f}",
            f"{row['layer_ms']:.3f}",
            _ratio(row, "tiles_of_cublas"),
            _ratio(row, "layer_of_cublas"),
        ]
        for row in sorted(document["products"], key=lambda row: row["layer_of_cublas"])
    ]
    head = ["share of", "routing", "tokens", "cuBLAS over", "cuBLAS ms", "layer ms"]
    return markdown([*head, "cuBLAS / tiles", "cuBLAS / layer"], rows)


def _ratio(row: dict, name: str) -> str:
    low, high = row[f"{name}_interval"]
    return f"{row[name]:.3f} [{low:.3f}, {high:.3f}]"


def epilogues(document: dict) -> str:
    """What activations, biases and sizes that are no multiples of a step cost; dearest first."""
    weights = {"silu": "bf16", "3072": "FP8"}
    rows = [
        [
            row["model"],
            weights[row["base"]],
            f"{row['tokens']:,}",
            f"{row['base']}: {row['base_ms']:.3f}",
            f"{row['arm']}: {row['ms']:.3f}",
            _ratio(row, "time_ratio"),
            _ratio(row, "rate_ratio"),
        ]
        for row in sorted(
            document["epilogues"] + document["tails"], key=lambda row: row["rate_ratio"]
        )
    ]
    head = ["sizes of", "weights", "tokens", "base: ms", "arm: ms", "time / base", "rate / base"]
    return markdown(head, rows)


def before_after(document: dict) -> str:
    """Arms whose medians differ by more than 1 % and 5 us, slower ones first; how many do not."""
    rows, alike = [], 0
    for row in document["share"]:
        before, after = (np.median(row[f"{name}_ms"]) for name in ("before", "after"))
        if abs(after / before - 1) <= 0.01 or abs(after - before) <= 0.005:
            alike += 1
            continue
        cells = [row["model"], row["weights"], f"{row['tokens']:,}", row["arm"]]
        cells += [span(row[f"{name}_ms"], ".3f") for name in ("before", "after")]
        rows.append((after / before, [*cells, f"{after / before:.3f}"]))
    rows.sort(key=lambda row: -row[0])
    head = ["share of", "weights", "tokens", "arm", "before ms", "after ms", "after / before"]
    plans = [np.median(row["after_us"]) / np.median(row["before_us"]) for row in document["plan"]]
    return "\n".join(
        [
            markdown(head, [row[1] for row in rows]),
            "",
            f"Of the {len(document['share'])} arms, {alike} differ by at most 1 % or 5 us. The "
            f"{len(plans)} plans took {span(plans, '.3f')} times as long as before.",
        ]
    )


TABLES = {
    "cuda_products": {"products": products},
    "cuda_epilogues": {"epilogues": epilogues},
    "cuda_before_after": {"before_after": before_after},
    "cuda_fused_moe": {
        "pair": pair,
        "ranks_qwen": ranks_qwen,
        "ranks_gpt_oss": ranks_gpt_oss,
        "share": share,
        "of_dense": of_dense,
        "dense": dense,
        "parts": parts,
    },
    "cuda_layer": {"two_gpu_layer": two_gpu_layer},
    "cuda_baselines": {"baselines": baselines, "fp8_dense": fp8_dense},
    "cuda_plan": {"plan_counts": plan_counts, "plan": plan},
    "cuda_replication": {"copy": copy, "nccl": nccl, "tune": tune, "beside": beside},
}
