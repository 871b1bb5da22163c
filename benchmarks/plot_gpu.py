"""Draws what the GPU benchmarks measured: docs/figures/h200.png, from benchmarks/results.

python benchmarks/plot_gpu.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def draw_ranks(axis, rows: list[dict]) -> None:
    """Time of the layer by imbalance: OFF and its fit, ON beside it."""
    off = [(row["imbalance"], row["ms"]) for row in rows if row["arm"] == "off"]
    x, y = np.array(off).T
    slope, start = np.polyfit(x, y, 1)
    line = np.array([1, x.max()])
    r = np.corrcoef(x, y)[0, 1]
    axis.plot(line, start + slope * line, color="0.7", zorder=1)
    axis.scatter(x, y, color="C3", label=f"off: {start:.1f} + {slope:.1f} R ms, r = {r:.4f}")
    for arm, color in (("installed", "C0"), ("included", "C2")):
        balanced = [row for row in rows if row["arm"] == arm and row["imbalance_after"] < 1.01]
        points = [(row["imbalance"], row["ms"]) for row in balanced]
        label = "on, replicas there" if arm == "installed" else "on, plan and copies included"
        axis.scatter(*np.array(points).T, color=color, marker="s", s=18, label=label)
    axis.set(xlabel="R, most loaded rank over mean", ylabel="ms", ylim=(0, None))
    axis.set_title("EP8 as 8 ranks of one H200\n2048 x 768, E = 128, top-8, 8,192 tokens a rank")
    axis.legend(frameon=False, fontsize=8)


def draw_rates(axis, baselines: list[dict]) -> None:
    """The whole layer in one program's run, by library."""
    names = {"jax_iser": "jax_iser", "torch": "torch grouped_mm", "tokamax": "tokamax"}
    names["pallas"] = "Pallas ragged_dot_mgpu"
    rows = [row for row in baselines if row.get("tokens") == 8192]
    for i, routing in enumerate(("even", "skewed")):
        rates = [
            next(r["tflops"] for r in rows if r["arm"] == arm and r["routing"] == routing)
            for arm in names
        ]
        bars = axis.barh(np.arange(len(names)) + 0.38 * i, rates, 0.36, label=f"{routing} groups")
        axis.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    axis.set_yticks(np.arange(len(names)) + 0.19, names.values())
    axis.invert_yaxis()
    dense = max(row["tflops"] for row in baselines if row.get("kind") == "bf16")
    axis.axvline(dense, color="0.5", linestyle=":")
    axis.set(xlabel=f"TFLOP/s, bf16 (dotted: best dense, {dense:.0f})", xlim=(0, 900))
    axis.set_title("Whole layer, one rank's share of DeepSeek-V4-Pro\n48 experts, 49,152 rows")
    axis.legend(framealpha=1, edgecolor="none", fontsize=8, loc="lower right")


def main() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    draw_ranks(axes[0], load("cuda_fused_moe")["ranks_qwen3"])
    draw_rates(axes[1], load("cuda_baselines")["baselines"])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "figures" / "h200.png", dpi=130)


if __name__ == "__main__":
    main()
