"""How the figures of a prefill look: a table, bars in the terminal, a picture."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table

from jax_iser.cli._output import bar, make_table, or_dash

_TILES_NOTE = (
    "busy, ms: CPU time in expert tiles of each layer call's slowest rank, summed over the chunks. "
    "It is the time a layer would take if every rank had a core of its own. Wall time cannot show "
    "that gain here: {ranks} ranks share {cores} cores, which do the same work in total however it "
    "is split."
)
_CALL_NOTE = (
    "layer, ms: time of each layer call on its slowest GPU, from its start to its output, summed "
    "over the chunks. Ranks that share a GPU do the same work in total however it is split among "
    "them: what balancing gains shows between GPUs, and on one GPU only what it costs."
)


def print_result(console: Console, result: dict) -> None:
    """Table per layer and in total, bars of R, and what the figures mean."""
    console.print(_table(result))
    if result["imbalance_off_mean"] is not None:
        _print_bars(console, result)
    if result["busy_max_on_s"] is not None or result["busy_max_off_s"] is not None:
        tiles = _TILES_NOTE.format(ranks=result["ep"], cores=os.cpu_count())
        console.print(_CALL_NOTE if _is_of_calls(result) else tiles, style="dim")
    for line in _summary(result):
        console.print(line)


def _is_of_calls(result: dict) -> bool:
    """Whether times are whole layer calls of GPUs, not expert tiles of ranks."""
    return result["seconds_of"] == "call"


def _table(result: dict) -> Table:
    time = "layer" if _is_of_calls(result) else "busy"
    table = make_table(
        *("layer", "R off", "R on", "broadcasts", "copies", "MiB"),
        *(f"{time} off", f"{time} on", "on/off"),
    )
    for layer in result["layers"]:
        table.add_row(str(layer["layer"]), *_cells(layer, layer["imbalance_off"]))
    table.add_section()
    total = {
        "imbalance_on": result["imbalance_on_mean"],
        "copied_bytes": result["copied_bytes"],
        "busy_max_off_s": result["busy_max_off_s"],
        "busy_max_on_s": result["busy_max_on_s"],
    }
    for name in ("broadcasts", "remote_copies"):
        values = [layer[name] for layer in result["layers"]]
        total[name] = None if None in values else sum(values)
    table.add_row("all", *_cells(total, result["imbalance_off_mean"]))
    return table


def _cells(row: dict, imbalance_off) -> list[str]:
    off, on, copied = row["busy_max_off_s"], row["busy_max_on_s"], row["copied_bytes"]
    return [
        or_dash(imbalance_off, "{:.3f}"),
        or_dash(row["imbalance_on"], "{:.3f}"),
        or_dash(row["broadcasts"], "{:,}"),
        or_dash(row["remote_copies"], "{:,}"),
        or_dash(copied and copied / 2**20, "{:,.1f}"),
        or_dash(off and off * 1e3, "{:.1f}"),
        or_dash(on and on * 1e3, "{:.1f}"),
        or_dash(on / off if on and off else None, "{:.2f}"),
    ]


def _print_bars(console: Console, result: dict) -> None:
    longest = max(layer["imbalance_off"] for layer in result["layers"])
    console.print(
        "R, most loaded rank over mean, before (░) and after (█) balancing; 1 is balanced"
    )
    for layer in result["layers"]:
        before, after = layer["imbalance_off"], layer["imbalance_on"]
        console.print(f"{layer['layer']:>5}  {bar(before, longest, mark='░')} {before:.3f}")
        if after is not None:
            console.print(f"{'':>5}  {bar(after, longest)} {after:.3f}")


def _summary(result: dict):
    if result["bits_per_byte"] is not None:
        yield f"bits per byte: {result['bits_per_byte']:.3f} of {result['text_bytes']:,} bytes"
    if result["imbalance_on_mean"] is not None:
        yield f"R: {result['imbalance_off_mean']:.3f} off, {result['imbalance_on_mean']:.3f} on"
    if result["busy_max_off_s"] and result["busy_max_on_s"]:
        busy = result["busy_max_on_s"] / result["busy_max_off_s"]
        ratio = result["imbalance_on_mean"] / result["imbalance_off_mean"]
        whose = "GPU's layer" if _is_of_calls(result) else "rank's busy"
        yield f"slowest {whose} time on/off: {busy:.3f}; R on/off: {ratio:.3f}"
    rates = [f"{arm} {rate:,.0f}" for arm, rate in result["tokens_per_s"].items() if rate]
    yield f"tokens/s (wall): {', '.join(rates)}"
    if "fb" in result["arms"]:
        yield "fb: forced balanced routing; its outputs mean nothing and are not reported"
    if result["bitwise_equal"] is not None:
        same = "equal to the bit" if result["bitwise_equal"] else "DIFFERENT"
        yield f"logits of all chunks, on and off: {same}"


def plot(result: dict, path: str) -> None:
    """R per layer before and after, and the slowest rank's or GPU's time beside it."""
    from matplotlib.figure import Figure

    timed = result["busy_max_off_s"] is not None or result["busy_max_on_s"] is not None
    figure = Figure(figsize=(10 if timed else 5.5, 3.8), layout="constrained")
    axes = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    _bars(axes[0], result, ("imbalance_off", "imbalance_on"), 1)
    axes[0].axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes[0].set_ylabel("R: most loaded rank / mean")
    axes[0].set_title("Imbalance")
    if timed:
        _bars(axes[1], result, ("busy_max_off_s", "busy_max_on_s"), 1e3)
        if _is_of_calls(result):
            what, whose = "Time of layer calls", "Slowest GPU"
        else:
            what, whose = "CPU time in expert tiles", "Busy time of the slowest rank"
        axes[1].set_ylabel(f"{what}, ms")
        axes[1].set_title(whose)
    figure.suptitle(
        f"{result['model']}: EP{result['ep']}, {result['slots']} helper slots, "
        f"{result['tokens_per_rank']} tokens a rank, {result['chunks']} chunks",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _bars(axes, result, names, scale) -> None:
    """Pairs of bars that differ in fill and hatch, so that they read in black and white."""
    looks = ({"color": "0.75", "hatch": "///"}, {"color": "0.25"})
    for side, (name, label, look) in enumerate(
        zip(names, ("off", "on (HALO-Q)"), looks, strict=True)
    ):
        rows = [layer for layer in result["layers"] if layer[name] is not None]
        places = [layer["layer"] + 0.4 * (side - 0.5) for layer in rows]
        heights = [layer[name] * scale for layer in rows]
        if rows:
            axes.bar(places, heights, 0.38, edgecolor="black", linewidth=0.6, label=label, **look)
    axes.set_xticks([layer["layer"] for layer in result["layers"]])
    axes.set_xlabel("MoE layer")
    axes.margins(y=0.18)
    axes.legend(loc="upper right", ncols=2, frameon=False)
