"""Figures of replays and models, after the paper's 1, 2, 3, 4(c), 5(b) and 7; black and white."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

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


def _legend(figure: Figure, ax, columns: int = 4) -> None:
    """The legend of an axis below all panels, where it hides nothing."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(columns, len(labels)),
        fontsize=8,
        frameon=False,
    )


def _ep_axis(ax, eps: Sequence[int]) -> None:
    """A tick for each EP degree, with room around a single one."""
    ax.set_xticks(eps, [str(ep) for ep in eps])
    room = max(1.0, 0.05 * (max(eps) - min(eps)))
    ax.set_xlim(min(eps) - room, max(eps) + room)


def _layer_axis(ax, num_layers: int) -> None:
    """Whole layers as ticks, room around a single one."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if num_layers == 1:
        ax.set_xticks([0])


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
    ax.margins(y=0.1)


def imbalance_figure(rows: Sequence[Row], folder: Path) -> Path:
    """Imbalance without balancing: by layer at the EP degree next to 8, and by EP degree."""
    figure, axes = _new(2)
    traces: dict[str, dict[int, Row]] = {}
    for row in rows:
        traces.setdefault(row.figures["trace"], {}).setdefault(row.figures["ep"], row)
    for index, (name, by_ep) in enumerate(traces.items()):
        style = {"color": "black", "linestyle": LINES[index % 6], "linewidth": 1}
        middle = by_ep[_next_to_eight(by_ep)]
        marker = MARKERS[index % 6] if len(middle.layers_off) < 9 else None
        axes[0, 0].plot(middle.layers_off, marker=marker, **style)
        eps = sorted(by_ep)
        means = [by_ep[ep].figures["imbalance_off"] for ep in eps]
        axes[0, 1].plot(eps, means, marker=MARKERS[index % 6], label=name, **style)
    shown = sorted({_next_to_eight(by_ep) for by_ep in traces.values()})
    by_layer = "no balancing, by layer, " + " and ".join(f"EP{ep}" for ep in shown)
    axes[0, 0].set(xlabel="MoE layer", ylabel="R, mean over iterations", title=by_layer)
    by_degree = "no balancing, by EP degree"
    axes[0, 1].set(xlabel="EP degree", ylabel="R, mean over layers", title=by_degree)
    _layer_axis(axes[0, 0], max(len(row.layers_off) for row in rows))
    _ep_axis(axes[0, 1], sorted({ep for by_ep in traces.values() for ep in by_ep}))
    for ax in axes.flat:
        ax.title.set_fontsize(9)
        ax.axhline(1, color="0.6", linestyle=":", linewidth=0.8)
    _legend(figure, axes[0, 1])
    return _save(figure, folder, "imbalance_without_balancing")


def _next_to_eight(by_ep) -> int:
    return min(by_ep, key=lambda ep: abs(ep - 8))


def popularity_figure(totals: dict[str, np.ndarray], folder: Path) -> Path:
    """Cumulative share of a layer's routes over its experts, hottest first, for each trace."""
    figure, axes = _new(len(totals), width=3.4)
    for ax, (name, layers) in zip(axes[0], totals.items(), strict=True):
        layers = layers[layers.any(axis=1)]
        share = -np.sort(-layers, axis=1) / layers.sum(axis=1, keepdims=True)
        share = 100 * np.cumsum(share, axis=1)
        x = 100 * np.arange(1, share.shape[1] + 1) / share.shape[1]
        lines = ax.plot(x, share.T, color="0.75", linewidth=0.4)
        lines[0].set_label("one layer")
        ax.plot(x, share.mean(axis=0), color="black", linewidth=2, label="mean over layers")
        ax.plot([0, 100], [0, 100], "k--", linewidth=0.8, label="all experts alike")
        tops = [n for n in (16, 8, 4, 2, 1) if n <= share.shape[1]]
        text = "\n".join(f"Top-{n}: {share.mean(axis=0)[n - 1]:.2f} %" for n in tops)
        ax.text(97, 4, text, ha="right", fontsize=8)
        ax.set(xlabel="experts, hottest first (%)", title=f"popularity, {name}")
        ax.title.set_fontsize(9)
    axes[0, 0].set_ylabel("cumulative share of routes (%)")
    _legend(figure, axes[0, 0], columns=3 if len(totals) > 1 else 2)
    return _save(figure, folder, "expert_popularity")


def owner_figure(rows: Sequence[Row], folder: Path) -> Path | None:
    """The most expert payloads out of one owner in a layer, over the calls of all traces."""
    wanted = [r for r in rows if r.figures["owner_copies_max"]]
    if not wanted:
        return None
    figure, axes = _new(1, width=6)
    eps = sorted({r.figures["ep"] for r in wanted})
    names = list(dict.fromkeys(r.figures["policy"] for r in wanted))[:5]
    series: dict[str, list[int]] = {name: [0] * len(eps) for name in names}
    for row in wanted:
        if (name := row.figures["policy"]) in series:
            place, most = eps.index(row.figures["ep"]), row.figures["owner_copies_max"]
            series[name][place] = max(series[name][place], most)
    _bars(axes[0, 0], [f"EP{ep}" for ep in eps], series)
    axes[0, 0].set(
        ylabel="expert payloads", title="out of the busiest owner in a layer, worst call"
    )
    axes[0, 0].title.set_fontsize(9)
    axes[0, 0].yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, axes[0, 0], columns=5)
    return _save(figure, folder, "busiest_owner_copies")


def objectives_figure(rows: Sequence[Row], folder: Path) -> Path | None:
    """HALO-Q's two objectives, of the first trace: imbalance by layer, and the largest send-out
    and receive-in, off and on."""
    rows = [r for r in rows if r.figures["policy"].split(":")[0] == "haloq"]
    if not rows:
        return None
    first = tuple(rows[0].figures[key] for key in ("trace", "slots", "policy"))
    by_ep = [r for r in rows if tuple(r.figures[k] for k in ("trace", "slots", "policy")) == first]
    by_ep.sort(key=lambda row: row.figures["ep"])
    figure, axes = _new(len(by_ep) + 1, width=2.8, height=3.5)
    for ax, row in zip(axes[0], by_ep, strict=False):
        order = np.argsort(row.layers_off)
        marker = "o" if len(order) < 9 else None
        ax.plot(row.layers_off[order], color="black", marker=marker, label="R, no balancing")
        label = f"R, {row.figures['policy']}, S = {row.figures['slots']}"
        ax.plot(
            row.layers_on[order], color="black", linestyle="--", marker=marker and "s", label=label
        )
        ax.axhline(1, color="0.6", linestyle=":", linewidth=0.8)
        means = f"{row.figures['imbalance_off']:.2f} to {row.figures['imbalance']:.3f}"
        ax.set(title=f"EP{row.figures['ep']}: mean R {means}", xlabel="layers, by R unbalanced")
        _layer_axis(ax, len(order))
        ax.title.set_fontsize(9)
    axes[0, 0].set_ylabel(f"R of {first[0]}")
    _locality(axes[0, -1], by_ep)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    more = axes[0, -1].get_legend_handles_labels()
    figure.legend(
        [*handles, *more[0]],
        [*labels, *more[1]],
        loc="outside lower center",
        ncols=6 if len(by_ep) > 2 else 3,
        fontsize=8,
        frameon=False,
    )
    return _save(figure, folder, "haloq_objectives")


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
        for field, pair in (("send_max_change", 0), ("recv_max_change", 2)):
            if row.figures[field] is None:
                continue
            height = routes[place, pair : pair + 2].max()
            text = f"{100 * row.figures[field]:+.0f}%"
            at = place + (pair - 1) * width
            ax.annotate(
                text,
                (at, height),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=6,
                rotation=90,
            )
    ax.set_xticks(range(len(by_ep)), [f"EP{row.figures['ep']}" for row in by_ep])
    ax.set(ylabel="routes (10³), mean over calls", title="largest rank's traffic")
    ax.title.set_fontsize(9)
    ax.set_ylim(0, max(routes.max() * 1.2, 1e-3))


def roofline_figure(scenarios, times: dict[str, float], title: str, folder: Path) -> Path:
    """Math over communication of every scenario, and the times of the layer that `title` names."""
    devices = list(dict.fromkeys(s.device for s in scenarios))
    figure, axes = _new(len(devices) + 1, width=5.2, height=3.6)
    for ax, device in zip(axes[0], devices, strict=False):
        mine = [s for s in scenarios if s.device == device]
        routed, both = ([s.above for s in mine if s.shared == shared] for shared in (False, True))
        hide = f"{sum(routed)} of {len(routed)} scenarios hide, {sum(both)} with the shared expert"
        ax.set_title(f"{device}: {hide}", fontsize=9)
        _scenario_bars(ax, mine)
    axes[0, 0].set_ylabel("10³ FLOP per communicated byte")
    _time_bars(axes[0, -1], times)
    axes[0, -1].set_title(title, fontsize=9)
    _legend(figure, axes[0, 0])
    return _save(figure, folder, "math_over_communication")


def _scenario_bars(ax, scenarios):
    for shared, style in ((False, GREYS[0]), (True, GREYS[2])):
        bars = [s for s in scenarios if s.shared == shared]
        x = np.arange(len(bars)) + (0.4 if shared else 0)
        label = "with the shared expert" if shared else "routed experts only"
        # Without traffic there is nothing to divide by, and no bar.
        heights = [s.ratio / 1e3 if np.isfinite(s.ratio) else 0 for s in bars]
        drawn = ax.bar(x, heights, 0.4, color=style, edgecolor="black", label=label)
        for bar, scenario in zip(drawn, bars, strict=True):
            if not np.isfinite(scenario.ratio):
                at = (bar.get_x() + bar.get_width() / 2, 0)
                ax.annotate("no traffic", at, rotation=90, ha="center", va="bottom", fontsize=6)
            elif not scenario.above:
                bar.set_hatch("////")
                bar.set_edgecolor("black" if shared else "white")
    line = scenarios[0].line / 1e3
    label = "what copies and traffic hide above (hatched: below)"
    ax.axhline(line, color="black", linestyle="--", linewidth=1, label=label)
    half = [s for s in scenarios if not s.shared]
    ax.set_xticks(np.arange(len(half)) + 0.2, [str(s.copies) for s in half], fontsize=7)
    ax.set_xlabel(_groups(half), fontsize=7)


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
            if not width:
                continue
            ax.text(
                left + width / 2, row, f"{name}\n{width:.0f}", ha="center", va="center", fontsize=7
            )
            left += width
    ax.set_yticks(range(len(bars)), [name for name, _ in reversed(bars)], fontsize=8)
    ax.set_xlabel("µs at peak rates")
    ax.margins(x=0.02)


def broadcast_figure(rows, folder: Path) -> Path:
    """Broadcast bandwidth over group size, modelled and measured."""
    figure, axes = _new(1, width=5)
    ax = axes[0, 0]
    x = [row.group_size for row in rows]
    for index, (label, field) in enumerate(
        (
            ("ring (model)", "ring_gbps"),
            ("scatter + all-gather (model)", "scatter_all_gather_gbps"),
            ("SAMI (model)", "sami_gbps"),
        )
    ):
        values = [getattr(row, field) for row in rows]
        ax.plot(
            x, values, color="black", linestyle=LINES[index], marker=MARKERS[index], label=label
        )
    measured = [(row.group_size, row.one_port_gbps) for row in rows if row.one_port_gbps]
    if measured:
        label = "one port (measured in the paper)"
        ax.plot(*zip(*measured, strict=True), "kD", markerfacecolor="white", label=label)
    title = "copying one expert to a group of ranks"
    ax.set(xlabel="ranks of the group", ylabel="payload / time (GB/s)", ylim=(0, None), title=title)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.title.set_fontsize(9)
    if len(x) == 1:
        ax.set_xlim(x[0] - 1, x[0] + 1)
    _legend(figure, ax, columns=2)
    return _save(figure, folder, "broadcast_bandwidth")
