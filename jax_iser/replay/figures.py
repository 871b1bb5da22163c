"""Figures in the manner of the paper's 1, 2, 3, 4(c), 5(b) and 7, readable in black and white."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from jax_iser.replay.engine import Row

# Grey, hatch, marker and line of the n-th series: each tells it apart without colour.
GREYS = ("0.25", "0.65", "0.9", "0.45", "1.0")
HATCHES = ("", "///", "...", "xxx", "")
MARKERS, LINES = ("o", "s", "^", "D", "v", "x"), ("-", "--", ":", "-.", "-", "--")


def _new(columns: int, rows: int = 1, width: float = 4.2, height: float = 3.2):
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return path


def _bars(ax, groups: Sequence[str], series: Mapping[str, Sequence[float]], fmt: str = "{:g}"):
    """Grouped bars with their values on top."""
    width = 0.8 / len(series)
    for index, (label, values) in enumerate(series.items()):
        x = np.arange(len(groups)) + (index - (len(series) - 1) / 2) * width
        style = {"color": GREYS[index % 5], "hatch": HATCHES[index % 5], "edgecolor": "black"}
        bars = ax.bar(x, values, width, label=label, **style)
        ax.bar_label(bars, [fmt.format(v) for v in values], fontsize=7, padding=1)
    ax.set_xticks(range(len(groups)), groups)


def imbalance_figure(rows: Sequence[Row], folder: Path) -> Path:
    """Figure 1: imbalance without balancing by layer, and its mean by EP degree, for each trace."""
    figure, axes = _new(2)
    traces: dict[str, dict[int, Row]] = {}
    for row in rows:
        traces.setdefault(row.figures["trace"], {}).setdefault(row.figures["ep"], row)
    for index, (name, by_ep) in enumerate(traces.items()):
        style = {"color": "black", "linestyle": LINES[index % 6], "linewidth": 1}
        middle = by_ep[min(by_ep, key=lambda ep: abs(ep - 8))]
        axes[0, 0].plot(middle.layers_off, label=f"{name}, EP{middle.figures['ep']}", **style)
        eps = sorted(by_ep)
        means = [by_ep[ep].figures["imbalance_off"] for ep in eps]
        axes[0, 1].plot(eps, means, marker=MARKERS[index % 6], label=name, **style)
    axes[0, 0].set(xlabel="MoE layer", ylabel="R, mean over iterations")
    axes[0, 1].set(xlabel="EP degree", ylabel="R, mean over layers")
    for ax in axes.flat:
        ax.axhline(1, color="0.6", linestyle=":", linewidth=0.8)
        ax.legend(fontsize=7, frameon=False)
    return _save(figure, folder, "fig1_imbalance")


def popularity_figure(totals: dict[str, np.ndarray], folder: Path) -> Path:
    """Figure 2: cumulative share of a layer's routes over its experts, hottest first."""
    figure, axes = _new(len(totals), width=3.4)
    for ax, (name, layers) in zip(axes[0], totals.items(), strict=True):
        share = -np.sort(-layers, axis=1) / np.maximum(layers.sum(axis=1, keepdims=True), 1)
        share = 100 * np.cumsum(share, axis=1)
        x = 100 * np.arange(1, share.shape[1] + 1) / share.shape[1]
        ax.plot(x, share.T, color="0.75", linewidth=0.4)
        ax.plot(x, share.mean(axis=0), color="black", linewidth=2)
        ax.plot([0, 100], [0, 100], color="black", linestyle="--", linewidth=0.8)
        tops = [n for n in (16, 8, 4, 2, 1) if n <= share.shape[1]]
        text = "\n".join(f"Top-{n}: {share.mean(axis=0)[n - 1]:.2f} %" for n in tops)
        ax.text(97, 4, text, ha="right", fontsize=8)
        ax.set(xlabel="experts, hottest first (%)", title=name)
        ax.title.set_fontsize(9)
    axes[0, 0].set_ylabel("cumulative share of routes (%)")
    return _save(figure, folder, "fig2_popularity")


def owner_figure(rows: Sequence[Row], folder: Path) -> Path | None:
    """Figure 4(c): the most copies out of one owner in a layer, point to point beside multicast."""
    wanted = [r for r in rows if r.figures["owner_copies_max"]]
    if not wanted:
        return None
    figure, axes = _new(1, width=6)
    eps = sorted({r.figures["ep"] for r in wanted})
    names = list(dict.fromkeys(r.figures["policy"] for r in wanted))[:5]
    series: dict[str, list[int]] = {name: [0] * len(eps) for name in names}
    for row in wanted:  # the worst of all traces
        if (name := row.figures["policy"]) in series:
            place, most = eps.index(row.figures["ep"]), row.figures["owner_copies_max"]
            series[name][place] = max(series[name][place], most)
    _bars(axes[0, 0], [f"EP{ep}" for ep in eps], series)
    axes[0, 0].set_ylabel("busiest owner's copies, worst call")
    axes[0, 0].legend(fontsize=7, frameon=False, ncols=2)
    return _save(figure, folder, "fig4c_owner_copies")


def objectives_figure(rows: Sequence[Row], folder: Path) -> Path | None:
    """Figure 7, of the first trace and HALO-Q: imbalance by layer, and the largest send-out and
    receive-in, off and on."""
    rows = [r for r in rows if r.figures["policy"].split(":")[0] == "haloq"]
    if not rows:
        return None
    first = tuple(rows[0].figures[key] for key in ("trace", "slots", "policy"))
    by_ep = [r for r in rows if tuple(r.figures[k] for k in ("trace", "slots", "policy")) == first]
    by_ep.sort(key=lambda row: row.figures["ep"])
    figure, axes = _new(len(by_ep) + 1, width=2.8)
    for ax, row in zip(axes[0], by_ep, strict=False):
        order = np.argsort(row.layers_off)
        ax.plot(row.layers_off[order], color="black", label="no balancing")
        label = f"{row.figures['policy']}, S = {row.figures['slots']}"
        ax.plot(row.layers_on[order], color="black", linestyle="--", label=label)
        ax.axhline(1, color="0.6", linestyle=":", linewidth=0.8)
        means = f"{row.figures['imbalance_off']:.2f} to {row.figures['imbalance']:.3f}"
        ax.set(title=f"EP{row.figures['ep']}: {means}", xlabel="layers by R")
        ax.title.set_fontsize(9)
    axes[0, 0].set_ylabel(f"{first[0]}: R, mean over iterations")
    axes[0, 0].legend(fontsize=7, frameon=False)
    _locality(axes[0, -1], by_ep)
    return _save(figure, folder, "fig7_objectives")


def _locality(ax, by_ep):
    names = ("send-out, off", "send-out, on", "receive-in, off", "receive-in, on")
    routes = np.array([row.routes for row in by_ep]) / 1000
    width = 0.2
    for index, name in enumerate(names):
        ax.bar(
            np.arange(len(by_ep)) + (index - 1.5) * width,
            routes[:, index],
            width,
            label=name,
            color=GREYS[index],
            hatch=HATCHES[index],
            edgecolor="black",
        )
    for place, row in enumerate(by_ep):
        for field, shift in (("send_max_change", -1), ("recv_max_change", 1)):
            if row.figures[field] is None:
                continue
            height = routes[place].max() * 1.02
            text = f"{100 * row.figures[field]:+.0f} %"
            ax.text(place + shift * 1.1 * width, height, text, ha="center", fontsize=6)
    ax.set_xticks(range(len(by_ep)), [f"EP{row.figures['ep']}" for row in by_ep])
    ax.set_ylabel("most routes of a rank (10³)")
    ax.set_ylim(0, routes.max() * 1.35)
    ax.legend(fontsize=6, frameon=False, ncols=2, loc="upper left")


def roofline_figure(scenarios, times: dict[str, float], folder: Path) -> Path:
    """Figure 3: math over communication of every scenario, and one layer's times."""
    devices = list(dict.fromkeys(s.device for s in scenarios))
    figure, axes = _new(len(devices) + 1, width=5.2)
    for ax, device in zip(axes[0], devices, strict=False):
        mine = [s for s in scenarios if s.device == device]
        for shared, style in ((False, GREYS[0]), (True, GREYS[2])):
            bars = [s for s in mine if s.shared == shared]
            x = np.arange(len(bars)) + (0.4 if shared else 0)
            label = "routed + shared" if shared else "routed only"
            drawn = ax.bar(x, [s.ratio / 1e3 for s in bars], 0.4, color=style, edgecolor="black")
            drawn.set_label(f"{label}: {sum(s.above for s in bars)}/{len(bars)} above")
            for bar, scenario in zip(drawn, bars, strict=True):
                if not scenario.above:
                    bar.set_hatch("////")
                    bar.set_edgecolor("white" if not shared else "black")
        line = mine[0].line / 1e3
        ax.axhline(line, color="black", linestyle="--", linewidth=1)
        half = [s for s in mine if not s.shared]
        ax.set_xticks(np.arange(len(half)) + 0.2, [str(s.copies) for s in half], fontsize=7)
        ax.set(title=f"{device} (dashed: {line:.1f})", xlabel=_groups(half))
        ax.xaxis.label.set_fontsize(7)
        ax.legend(fontsize=7, frameon=False)
    axes[0, 0].set_ylabel("10³ FLOP/B")
    _time_bars(axes[0, -1], times)
    return _save(figure, folder, "fig3_roofline")


def _groups(scenarios):
    """What the groups of bars are, left to right; each group's bars differ in copies."""
    by_model: dict[str, list[str]] = {}
    for model, tokens in dict.fromkeys((s.model, s.tokens_per_rank) for s in scenarios):
        by_model.setdefault(model, []).append(f"{tokens:,}")
    names = " | ".join(f"{model} {' | '.join(t)}" for model, t in by_model.items())
    return f"copies per rank, by model and tokens/rank:\n{names}"


def _time_bars(ax, times):
    """One layer in time: what its computation takes, over what its links take."""
    copies = 4 * times["copy_us"]
    bars = (
        ("links, beside routed", (("tokens", times["token_traffic_us"]), ("4 copies", copies))),
        ("routed experts", (("routed", times["routed_us"]),)),
        ("links, beside shared", (("4 copies", copies),)),
        ("shared expert", (("shared", times["shared_us"]),)),
    )
    for row, (_, parts) in enumerate(reversed(bars)):
        left = 0.0
        for index, (name, width) in enumerate(parts):
            ax.barh(row, width, left=left, color=GREYS[1 + index], edgecolor="black")
            ax.text(
                left + width / 2, row, f"{name}\n{width:.0f}", ha="center", va="center", fontsize=7
            )
            left += width
    ax.set_yticks(range(len(bars)), [name for name, _ in reversed(bars)], fontsize=8)
    ax.set_xlabel("µs at peak rates")


def broadcast_figure(rows, folder: Path) -> Path:
    """Figure 5(b): broadcast bandwidth over group size, modelled and measured."""
    figure, axes = _new(1, width=5)
    ax = axes[0, 0]
    x = [row.group_size for row in rows]
    for index, (label, field) in enumerate(
        (
            ("A: ring (model)", "ring_gbps"),
            ("B: scatter + all-gather (model)", "scatter_all_gather_gbps"),
            ("SAMI (model)", "sami_gbps"),
        )
    ):
        values = [getattr(row, field) for row in rows]
        ax.plot(
            x, values, color="black", linestyle=LINES[index], marker=MARKERS[index], label=label
        )
    measured = [(row.group_size, row.one_port_gbps) for row in rows if row.one_port_gbps]
    if measured:
        label = "C: one port (measured in the paper)"
        ax.plot(*zip(*measured, strict=True), "kD", markerfacecolor="white", label=label)
    ax.set(xlabel="group size g", ylabel="payload / time (GB/s)", ylim=(0, None))
    ax.legend(fontsize=7, frameon=False)
    return _save(figure, folder, "fig5b_broadcast")
