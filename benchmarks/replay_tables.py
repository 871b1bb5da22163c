"""The tables of docs/replay.md, as Markdown, from the figures of bench_replay.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from markdown import markdown, percent, span, span_percent

EPS = (4, 8, 16, 24)

# The paper's figures (sections 2.2, 3.2 and 6.1), by EP degree; None where it gives none.
PAPER = {
    "R, no balancing": ("1.20", "1.44", "1.84", "2.24"),
    "R, HALO-Q, S=4": ("1.002", "1.006", "1.010", "1.020"),
    "R, HALO-Q, S=3": ("1.008", "1.021", "1.036", "1.063"),
    "excess removed": ("99.0 %", "98.6 %", "98.8 %", "98.4 %"),
    "largest send-out, change": ("-8 %", "-6 %", "-3 %", "-2 %"),
    "largest receive-in, change": ("-19 %", "-31 %", "-45 %", "-55 %"),
    "of it by repair alone, send / receive": ("0.5-2.3 % both",) * 4,
    "remote copies a layer": (None, "20.4", "41.4", "76.2"),
    "busiest owner's payloads, median / max": (None, "2 / 4", "3 / 4", "3 / 4"),
    "broadcasts whose group excludes the owner": (None, "53 %", "76 %", "76 %"),
    "worst layer's mean R": (None, "1.066", None, None),
    "R, four hottest experts on every rank": (None, "1.038", "1.193", "1.348"),
    "R, four of the hottest ranks' on every rank": (None, "1.038", "1.193", "1.348"),
    "its copies a layer": (None, "28", "60", "92"),
    "all-rank selections that recur": ("74-78 %",) * 4,
    "R, only groups with the owner": (None, "1.038", "1.201", "1.296"),
    "R, point to point, unlimited": (None, *("1.001-1.009",) * 3),
    "its busiest owner's copies, p99 / max": (None, "7 / 10-14", "9 / 10-14", "10 / 10-14"),
    "R, point to point, 4 an owner": (None, *("1.016-1.100",) * 3),
    "HALO-Q's copies over its": (None, *("2.5-3.3",) * 3),
    "R, static EPLB, whole trace": (None, "1.06-1.07", None, None),
    "R, static EPLB, past loads": (None, "1.06-1.07", None, None),
    "R, LPLB-style re-split": (None,) * 4,
    "R, HALO-Q, groups down to one rank": (None,) * 4,
    "its copies, a layer": (None,) * 4,
    "copies with resident banks": (None,) * 4,
}


def ours(rows: list[dict], repair: list[dict]) -> dict[str, Callable[[int], str]]:
    """How each row's figure is read at an EP degree."""
    by = {(row["ep"], row["policy"]): row for row in rows}
    gain = {row["ep"]: row for row in repair}

    def r(policy):
        return lambda ep: f"{by[ep, policy]['imbalance']:.3f}"

    def copies(policy):
        return lambda ep: f"{by[ep, policy]['remote_copies']:.1f}"

    def owner(policy, field):
        return lambda ep: f"{by[ep, policy][field]:.0f} / {by[ep, policy]['owner_copies_max']}"

    def share(policy, field, sign=""):
        return lambda ep: percent(by[ep, policy][field], sign=sign)

    def over(ep):
        capped = by[ep, "p2p-capped"]["remote_copies"]
        return f"{by[ep, 'haloq']['remote_copies'] / capped:.1f}"

    def of_repair(ep):
        return f"{percent(gain[ep]['send'], 1, '+')} / {percent(gain[ep]['recv'], 1, '+')}"

    return {
        "R, no balancing": lambda ep: f"{by[ep, 'none']['imbalance']:.2f}",
        "R, HALO-Q, S=4": lambda ep: f"{by[ep, 'haloq']['imbalance']:.4f}",
        "R, HALO-Q, S=3": r("haloq:slots=3"),
        "excess removed": lambda ep: percent(by[ep, "haloq"]["excess_removed"], 1),
        "largest send-out, change": share("haloq", "send_max_change", "+"),
        "largest receive-in, change": share("haloq", "recv_max_change", "+"),
        "of it by repair alone, send / receive": of_repair,
        "remote copies a layer": copies("haloq"),
        "busiest owner's payloads, median / max": owner("haloq", "owner_copies_p50"),
        "broadcasts whose group excludes the owner": share("haloq", "groups_without_owner"),
        "worst layer's mean R": lambda ep: f"{by[ep, 'haloq']['imbalance_worst_layer']:.3f}",
        "R, four hottest experts on every rank": r("all-rank"),
        "R, four of the hottest ranks' on every rank": r("all-rank:choose=rank"),
        "its copies a layer": lambda ep: f"{by[ep, 'all-rank']['remote_copies']:.0f}",
        "all-rank selections that recur": share("all-rank", "replicas_recur"),
        "R, only groups with the owner": r("haloq-owner"),
        "R, point to point, unlimited": r("p2p"),
        "its busiest owner's copies, p99 / max": owner("p2p", "owner_copies_p99"),
        "R, point to point, 4 an owner": r("p2p-capped"),
        "HALO-Q's copies over its": over,
        "R, static EPLB, whole trace": r("eplb-whole"),
        "R, static EPLB, past loads": r("eplb-past"),
        "R, LPLB-style re-split": r("lplb"),
        "R, HALO-Q, groups down to one rank": r("haloq:min_group_size=1"),
        "its copies, a layer": copies("haloq:min_group_size=1"),
        "copies with resident banks": copies("haloq:resident=1"),
    }


def mixed_tables(rows: list[dict], repair: list[dict]) -> str:
    """Every row, ours and the paper's."""
    head = ["", *(name for ep in EPS for name in (f"EP{ep}", "paper"))]
    table = []
    for name, figure in ours(rows, repair).items():
        cells = [
            cell
            for ep, paper in zip(EPS, PAPER[name], strict=True)
            for cell in (figure(ep), paper or "")
        ]
        table.append([name, *cells])
    return markdown(head, table)


def mixed_remarks(rows: list[dict], repair: list[dict]) -> str:
    """Where our rows and the paper's differ, and by how much."""
    by = {(row["ep"], row["policy"]): row for row in rows}
    high = EPS[1:]

    def over(policy: str, paper: str, field: str = "imbalance", eps: tuple = high) -> list[float]:
        """Ours over the paper's, less 1."""
        theirs = dict(zip(EPS, PAPER[paper], strict=True))
        return [by[ep, policy][field] / float(theirs[ep]) - 1 for ep in eps]

    def at(policy: str, field: str = "imbalance", form: str = ".3f") -> str:
        return "/".join(f"{by[ep, policy][field]:{form}}" for ep in high)

    def excess(policy: str) -> float:
        return by[8, policy]["imbalance"] - 1

    def saved(policy: str, ep: int) -> str:
        copies = by[ep, policy]["remote_copies"] / by[ep, "haloq"]["remote_copies"]
        return percent(1 - copies)

    off = [abs(value) for value in over("none", "R, no balancing", eps=EPS)]
    on = over("haloq", "R, HALO-Q, S=4", eps=EPS)
    copies = over("haloq", "remote copies a layer", "remote_copies")
    hottest = over("all-rank", "R, four hottest experts on every rank")
    heaviest = over("all-rank:choose=rank", "R, four of the hottest ranks' on every rank")
    with_owner = over("haloq-owner", "R, only groups with the owner")
    outside = "/".join(f"{100 * by[ep, 'haloq']['groups_without_owner']:.0f}" for ep in high)
    gains = [-row[field] for row in repair for field in ("send", "recv")]
    one_rank = "haloq:min_group_size=1"
    capped = by[24, "p2p-capped"]
    fewer = by[24, "haloq"]["remote_copies"] / capped["remote_copies"]
    lines = [
        f"**Imbalance** without balancing is within {percent(max(off), 1)} of the paper's at every "
        f"EP degree; with HALO-Q it differs by {span_percent(on, 1, '+')}.",
        f"**Copies** of HALO-Q differ from the paper's by {span_percent(copies, 0, '+')} at EP8 to "
        f"EP24. Groups without the owner are {outside} % of all, where the paper has 53/76/76 %.",
        "**Four experts on every rank**: with the layer's four hottest experts R differs by "
        f"{span_percent(hottest, 1, '+')} from the paper's, which does not say how its four are "
        "chosen; with the heaviest experts of the hottest ranks it differs by "
        f"{span_percent(heaviest, 1, '+')}.",
        f"**Groups with the owner** leave {at('haloq-owner')}, {span_percent(with_owner, 1, '+')} "
        "against the paper. Its rule for owners whose group is full is not published; here the "
        "owner is frozen, as in the unrestricted planner.",
        f"**Capped point to point** leaves {capped['imbalance']:.3f} at EP24 (paper: at most "
        f"1.100) and HALO-Q makes {fewer:.1f} times its copies (paper: at most 3.3).",
        f"**Repair alone** cuts both maxima by {span_percent(gains)} (paper: 0.5-2.3 %).",
        "**Groups down to one rank**, which the paper leaves out, remove "
        f"{percent(1 - excess(one_rank) / excess('haloq'))} of the excess that is left at EP8, "
        f"with {saved(one_rank, 8)} fewer copies.",
        f"**Resident banks**, one per layer, save {saved('haloq:resident=1', 8)} of the copies at "
        f"EP8 and {saved('haloq:resident=1', 24)} at EP24.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def calibration_table(rows: list[dict]) -> str:
    """Other seeds: mean and range of the imbalance, off and on."""
    table = []
    for ep in EPS:
        mine = [row for row in rows if row["ep"] == ep]
        off, on = (np.array([row[key] for row in mine]) for key in ("off", "on"))
        table.append(
            [
                f"EP{ep}",
                f"{off.mean():.3f}",
                f"{off.min():.3f} to {off.max():.3f}",
                f"{on.mean():.4f}",
                f"{on.max():.4f}",
            ]
        )
    return markdown(["8 seeds", "R off, mean", "range", "R on, mean", "worst seed"], table)


def made_table(rows: list[dict]) -> str:
    """`off to on` of each made-up trace by EP degree."""
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    table = []
    for trace in traces:
        by = {(r["ep"], r["policy"]): r for r in rows if r["trace"] == trace}
        cells = [
            f"{by[ep, 'none']['imbalance']:.2f} to {by[ep, 'haloq']['imbalance']:.3f}" for ep in EPS
        ]
        table.append([trace, *cells])
    return markdown(["R, off to HALO-Q", *(f"EP{ep}" for ep in EPS)], table)


def recorded_table(rows: list[dict]) -> str:
    """Each recorded workload at each EP degree and chunk."""
    names = ("haloq", "haloq:min_group_size=1", "haloq-owner", "p2p", "p2p-capped", "lplb")
    head = [
        "trace",
        "EP",
        "tokens/rank",
        "iterations",
        "R off",
        *names,
        "HALO-Q copies",
        "receive-in",
    ]
    keys = dict.fromkeys((row["trace"], row["ep"], row["asked"]) for row in rows)
    table = []
    for trace, ep, asked in keys:
        mine = {
            r["policy"]: r for r in rows if (r["trace"], r["ep"], r["asked"]) == (trace, ep, asked)
        }
        first = mine["haloq"]
        if first["tokens_per_rank"] < asked < 8192:
            continue  # the same chunk again
        starred = "*" if any("equal run" in note for note in first["notes"]) else ""
        table.append(
            [
                f"{trace}{starred}",
                ep,
                first["tokens_per_rank"],
                first["iterations"],
                f"{first['imbalance_off']:.2f}",
                *(f"{mine[name]['imbalance']:.3f}" for name in names),
                f"{first['remote_copies']:.1f}",
                percent(first["recv_max_change"], sign="+"),
            ]
        )
    return markdown(head, table)


def recorded_remarks(rows: list[dict]) -> str:
    """What is left at EP16, the most skewed degree."""
    mine = [row for row in rows if row["ep"] == 16]
    by = {
        name: [r["imbalance"] for r in mine if r["policy"] == name]
        for name in ("haloq", "haloq-owner")
    }
    off = max(row["imbalance_off"] for row in mine)
    return (
        f"At EP16, where a rank owns two experts, R without balancing reaches {off:.2f}. HALO-Q "
        f"leaves {span(by['haloq'], '.3f')}; restricted to groups with the owner it leaves "
        f"{span(by['haloq-owner'], '.3f')}."
    )


def speed_table(rows: list[dict]) -> str:
    """Replay beside bare planner calls, and both cores beside one."""
    table = [
        [
            f"EP{row['ep']}",
            f"{1e3 * row['bare']:.0f} ms",
            f"{1e3 * row['replay']:.0f} ms",
            f"{row['replay'] / row['bare']:.2f}",
            f"{row['one'] / row['replay']:.2f}",
            f"{row['cores']:.2f}",
            f"{row['per_s']:,.0f}",
        ]
        for row in rows
    ]
    total = {key: sum(row[key] for row in rows) for key in ("bare", "replay", "one", "plans")}
    table.append(
        [
            "all",
            f"{1e3 * total['bare']:.0f} ms",
            f"{1e3 * total['replay']:.0f} ms",
            f"**{total['replay'] / total['bare']:.2f}**",
            f"{total['one'] / total['replay']:.2f}",
            "",
            f"{total['plans'] / total['replay']:,.0f}",
        ]
    )
    head = ["", "bare planner", "replay", "ratio", "one thread over two", "cores busy", "plans/s"]
    return markdown(head, table)


TABLES = {
    "replay": {
        "mixed": lambda document: mixed_tables(document["mixed"], document["repair"]),
        "mixed_remarks": lambda document: mixed_remarks(document["mixed"], document["repair"]),
        "seeds": lambda document: calibration_table(document["seeds"]),
        "made": lambda document: made_table(document["made"]),
        "recorded": lambda document: recorded_table(document["recorded"]),
        "recorded_remarks": lambda document: recorded_remarks(document["recorded"]),
    },
    "replay_speed": {"speed": lambda document: speed_table(document["speed"])},
}
