"""The peak-rate and broadcast models against every number of the paper's sections 3.1 and 3.3."""

import pytest

from jax_iser.replay.broadcast import broadcast_rows, ring_seconds, sami_seconds
from jax_iser.replay.roofline import DEVICES, MODELS, Device, Model, layer_times, scenarios


def shown(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}"


@pytest.mark.parametrize(
    ("key", "digits", "printed"),
    [
        ("copy_mb", 2, "37.16"),
        ("routed_us", 1, "432.9"),
        ("token_traffic_us", 1, "385.4"),
        ("copy_us", 1, "41.3"),
        ("shared_us", 1, "216.5"),
        ("copies_that_fit", 2, "1.15"),
        ("overrun_four_us", 1, "117.6"),
        ("bf16_combine_us", 0, "685"),
        ("helper_banks_mb", 0, "297"),
        ("helper_per_layer_gb", 2, "9.07"),
    ],
)
def test_layer_times_at_the_printed_digits(key, digits, printed):
    assert shown(layer_times(DEVICES[0], MODELS[0], 8192)[key], digits) == printed


@pytest.mark.parametrize(
    ("device", "shared", "above"),
    [("GB300", False, 12), ("GB300", True, 16), ("VR200", False, 0), ("VR200", True, 11)],
)
def test_scenarios_above_the_line(device, shared, above):
    rows = [s for s in scenarios() if s.device == device and s.shared == shared]
    assert len(rows) == 16
    assert sum(row.above for row in rows) == above


def test_ratios_and_lines():
    rows = scenarios()
    assert [shown(device.line, 0) for device in DEVICES] == ["16,667", "23,333"]
    without = {shown(s.ratio, 0) for s in rows if not s.copies and not s.shared}
    assert without == {"18,725"}
    gb300 = [s.ratio for s in rows if s.device == "GB300" and s.shared]
    assert (shown(min(gb300), 0), shown(max(gb300), 0)) == ("19,661", "32,768")


def test_own_device_and_one_rank():
    device = Device("mine", 2e15, 450e9, 2.0)
    model = Model("small", 2048, 1024, 4, 0, 2048)
    (row,) = scenarios([device], [model], [1024], [0], num_ranks=1)[:1]
    assert row.ratio == float("inf")  # one rank sends nothing
    assert row.above


def test_ring_at_sixteen():
    rows = {row.group_size: row for row in broadcast_rows(37_158_912)}
    assert shown(rows[16].ring_gbps, 0) == "250"
    assert [rows[g].one_port_gbps for g in (4, 8, 16)] == [535, 266, 127]
    assert rows[5].one_port_gbps is None
    # Scatter + all-gather moves the payload twice, so it stays below half of the link.
    assert rows[16].scatter_all_gather_gbps < 900 / 2 * 16 / 15


def test_sami_bytes():
    for row in broadcast_rows(37_158_912):
        assert row.sami_owner_out_mb == pytest.approx(37.158912)
        assert row.sami_member_out_mb == pytest.approx(37.158912 / row.group_size)
        assert row.sami_member_in_mb == pytest.approx(37.158912 * (1 + 1 / row.group_size))
    assert sami_seconds(1e9, 16) < ring_seconds(1e9, 2) * 1.1  # large payloads: near the link


def test_group_of_one_is_refused():
    with pytest.raises(ValueError, match="below 2"):
        broadcast_rows(1e6, [1])
