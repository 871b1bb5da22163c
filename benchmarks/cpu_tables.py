"""Tables of what CPUs measured: docs/performance.md and README.md."""

from __future__ import annotations

from markdown import markdown, span


def prefill(document: dict) -> str:
    """README's: imbalance and busy time without and with balancing, and whether logits agree."""
    found = document["prefill"]
    off, on = (f"{found[f'imbalance_{arm}_mean']:.3f}" for arm in ("off", "on"))
    busy = found["busy_max_on_s"] / found["busy_max_off_s"]
    bits = "equal to the bit" if found["bitwise_equal"] else "**different**"
    return markdown(
        ["", "without balancing", "with"],
        [
            ["imbalance R, most loaded rank over mean", off, on],
            ["busy time of the slowest rank, relative", "1", f"{busy:.2f}"],
            ["logits", "", bits],
        ],
    )


def planner(document: dict) -> str:
    rows = []
    for row in document["rows"]:
        us = row["micros_per_plan"]
        rows.append(
            [
                row["ep"],
                f"{us['cpp']:.1f}",
                *(f"{us[name]:,.0f}" for name in ("jax", "numpy", "eplb_numpy", "eplb_numpy_61")),
                f"{row['jax_over_cpp']:,.0f}",
                f"{row['numpy_over_cpp']:,.0f}",
                f"{row['eplb_over_cpp']:,.0f}",
                f"{us['eplb_numpy_61'] / us['cpp']:.1f}",
                f"{row['imbalance_off']:.3f}",
                f"{row['imbalance_on']:.3f}",
            ]
        )
    times = ["C++ us", "JAX us", "NumPy us", "EPLB us", "EPLB (61) us"]
    ratios = ["JAX / C++", "NumPy / C++", "EPLB / C++", "EPLB (61) / C++"]
    return markdown(["EP", *times, *ratios, "R off", "R on"], rows)


def layer(document: dict) -> str:
    found = document["rows"]
    head = [f"{row['dtype']}, {row['ranks_per_device']} ranks per device" for row in found]
    kinds = {
        "ON / OFF, skewed routing": "on_over_off_skewed",
        "ON / OFF, balanced routing": "on_over_off_balanced",
        "rate over dense f32 rate, balanced": "layer_over_dense_rate",
        "`lax.ragged_dot` layer / this layer": "ragged_dot_over_layer",
    }
    rows = [
        ["R of the skewed routing", *(f"{row['imbalance_off']:.2f}" for row in found)],
        ["R after balancing", *(f"{row['imbalance_on']:.3f}" for row in found)],
    ]
    for name, key in kinds.items():
        ratios = [row["ratios"].get(key) for row in found]
        rows.append([name, *("" if ratio is None else f"{ratio:.3g}" for ratio in ratios)])
    return markdown(["", *head], rows)


def copies(document: dict) -> str:
    by_time = sorted(document["copy"], key=lambda row: -row["seconds"])
    rows = [[row["copy_rule"], f"{1e3 * row['seconds']:.1f}"] for row in by_time]
    return markdown(["copy rule", "ms from the plan to READY on the slowest device"], rows)


PRODUCTS = {
    "ours": "this kernel",
    "openblas": "OpenBLAS",
    "eigen": "Eigen",
    "onednn": "oneDNN",
    "libxsmm": "libxsmm",
    "xla": "XLA dot",
}


def gemm(document: dict) -> str:
    """Bits and rates of each product, by instruction set."""
    head, rows = [""], {name: [label] for name, label in PRODUCTS.items()}
    for run in document["runs"]:
        isa = {"avx512": "AVX-512", "avx2": "AVX2"}.get(run["isa"], run["isa"])
        head += [f"{isa}: results of a row", "unstable heights", "rate, CPU time", "rate, wall"]
        for name, row in rows.items():
            bits = run["bits"][name]
            speed = run["speed"]["products"]
            by_cpu, by_wall = (
                [speed[f"{name} {height}"][f"ratio_{clock}"] for height in (32, 96, 128)]
                for clock in ("cpu", "wall")
            )
            if name != "ours":
                row[0] = f"{PRODUCTS[name]} ({bits['version']})"
            row += [
                span(bits["results_of_a_row"]),
                bits["heights_where_position_matters"],
                span(by_cpu, ".2f"),
                span(by_wall, ".2f"),
            ]
    return markdown(head, list(rows.values()))


def expert(document: dict) -> str:
    """The whole expert, as a fraction of NumPy's dense rate."""
    rows = []
    for run in document["runs"]:
        found = run["speed"]["expert"]
        cells = [
            f"{found[d][f'ratio_{clock}']:.2f}"
            for d in ("f32", "bf16")
            for clock in ("cpu", "wall")
        ]
        rows.append([run["isa"], *cells])
    return markdown(["", "f32, CPU time", "f32, wall", "bf16, CPU time", "bf16, wall"], rows)


TABLES = {
    "planner_cpu": {"planner": planner},
    "fused_moe_cpu": {"layer_cpu": layer, "copies_cpu": copies},
    "gemm_cpu": {"gemm": gemm, "expert": expert},
}
