"""What the page of the replay and the README say outside tables, against the kept figures."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "replay.md").read_text()
KEPT = json.loads((ROOT / "benchmarks" / "results" / "replay.json").read_text())


def test_what_the_readme_says_balancing_leaves():
    """The range of R before, and the most after, over every kept replay that the sentence names."""
    text = " ".join((ROOT / "README.md").read_text().split())
    low, high, left = re.search(
        r"the most loaded rank over the mean, of (\d\.\d+) to (\d\.\d+) down to at most (\d\.\d+)",
        text,
    ).groups()
    rows = [row for row in KEPT["mixed"] + KEPT["recorded"] if row["policy"] == "haloq"]
    off = [row["imbalance_off"] for row in rows]
    assert (f"{min(off):.2f}", f"{max(off):.2f}") == (low, high)
    assert f"{max(row['imbalance'] for row in rows):.3f}" == left


def test_what_the_page_says_of_hot_sets():
    on = [
        r["imbalance"]
        for r in KEPT["made"]
        if (r["trace"], r["policy"]) == ("workload:W1", "haloq")
    ]
    assert f"R is {min(on):.2f} at EP4 to {max(on):.2f} at\nEP24" in PAGE


def test_figures_of_the_page_are_there():
    shown = set(re.findall(r"\(figures/replay/(\w+\.png)\)", PAGE))
    assert shown == {path.name for path in (ROOT / "docs" / "figures" / "replay").iterdir()}
