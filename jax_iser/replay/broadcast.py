"""Models of broadcasting one expert to a group of g devices (paper section 3.3, Figure 5)."""

from __future__ import annotations

from typing import NamedTuple

# Measured by the paper on four GB200 trays: bytes/s per receiver at g = 4, 8, 16.
ONE_PORT_MEASURED = {4: 535e9, 8: 266e9, 16: 127e9}


class Link(NamedTuple):
    """A device's links: bytes/s each direction, seconds a step, bytes of a ring's slice."""

    bandwidth: float = 900e9
    latency: float = 5e-6
    slice_bytes: float = 2 * 2**20


PAPER_LINK = Link()


class Row(NamedTuple):
    """One group size of Figure 5(b), in GB/s of payload over time, and SAMI's bytes.

    `one_port_gbps` is measured, None where the paper has no measurement. The last three are MB:
    what leaves the owner, what each member injects, and what each member takes in.
    """

    group_size: int
    ring_gbps: float
    scatter_all_gather_gbps: float
    one_port_gbps: float | None
    sami_gbps: float
    sami_owner_out_mb: float
    sami_member_out_mb: float
    sami_member_in_mb: float


def ring_seconds(payload: float, g: int, link: Link = PAPER_LINK) -> float:
    """A: NCCL's pipelined ring. Each link carries the payload once; the fill grows with g."""
    fill = (g - 1) * link.latency + (g - 2) * link.slice_bytes / link.bandwidth
    return payload / link.bandwidth + fill


def scatter_all_gather_seconds(payload: float, g: int, link: Link = PAPER_LINK) -> float:
    """B: software scatter, then all-gather. All ports inject, but the payload moves twice."""
    return 2 * (g - 1) / g * payload / link.bandwidth + 2 * link.latency


def sami_seconds(payload: float, g: int, link: Link = PAPER_LINK) -> float:
    """SAMI: members pull a share each and multicast it, both steps in one pipeline.

    The owner sends the payload once, a member injects `payload / g` and takes in that share besides
    the payload: its ingress is the bound, and the two steps each cost a latency once.
    """
    return (1 + 1 / g) * payload / link.bandwidth + 2 * link.latency


def broadcast_rows(payload: float, group_sizes=range(2, 17), link: Link = PAPER_LINK) -> list[Row]:
    """All models at each group size; `payload` in bytes, group sizes from 2."""
    rows = []
    for g in group_sizes:
        if g < 2:
            raise ValueError(f"group size {g} is below 2; a broadcast needs a receiver")
        times = (
            function(payload, g, link)
            for function in (ring_seconds, scatter_all_gather_seconds, sami_seconds)
        )
        ring, gather, sami = (payload / seconds / 1e9 for seconds in times)
        measured = ONE_PORT_MEASURED.get(g)
        mega = payload / 1e6
        rows.append(
            Row(
                g,
                ring,
                gather,
                measured / 1e9 if measured else None,
                sami,
                mega,
                mega / g,
                mega * (1 + 1 / g),
            )
        )
    return rows
