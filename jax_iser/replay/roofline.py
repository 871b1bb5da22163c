"""Peak-rate model of one MoE layer: do expert copies hide (paper section 3.1, Figure 3)?"""

from __future__ import annotations

from typing import NamedTuple

BYTES_PER_ELEMENT = 0.5625  # NVFP4: 4 bits, and an 8-bit scale for 16 elements
BF16_BYTES = 2


class Device(NamedTuple):
    """Peak rates of one device.

    Attributes:
      flops: dense FP4 FLOP/s.
      link: bytes/s of its links, each direction.
      shared_weight: FP4 rate over the rate at which the shared expert runs.
    """

    name: str
    flops: float
    link: float
    shared_weight: float

    @property
    def line(self) -> float:
        """FLOP/B above which communication can hide behind computation."""
        return self.flops / self.link


class Model(NamedTuple):
    """Sizes of one MoE layer; the shared expert may run at another width than the routed ones."""

    name: str
    input_width: int
    intermediate_size: int
    top_k: int
    shared_experts: int
    shared_width: int
    num_layers: int = 61

    @property
    def copy_bytes(self) -> float:
        """Bytes of one expert's three planes."""
        return 3 * self.input_width * self.intermediate_size * BYTES_PER_ELEMENT

    def routed_flops(self, tokens: int) -> float:
        """FLOPs of a rank's routed experts under uniform routing."""
        return 6 * self.input_width * self.intermediate_size * self.top_k * tokens

    def shared_flops(self, tokens: int) -> float:
        """FLOPs of the shared experts for a rank's tokens."""
        return 6 * self.shared_width * self.intermediate_size * self.shared_experts * tokens

    def traffic_bytes(self, tokens: int, num_ranks: int) -> float:
        """Dispatch and combine bytes that leave a rank under uniform routing."""
        away = (num_ranks - 1) / num_ranks
        return 2 * self.input_width * BYTES_PER_ELEMENT * self.top_k * tokens * away


class Scenario(NamedTuple):
    """One bar of Figure 3; `above` says that copies and traffic hide at peak rates."""

    device: str
    model: str
    tokens_per_rank: int
    copies: int
    shared: bool
    ratio: float
    line: float
    above: bool


DEVICES = (Device("GB300", 15e15, 900e9, 3.0), Device("VR200", 35e15, 1.5e12, 2.0))
# Kimi K3's shared experts are taken at the full width 7168: only this gives the paper's counts.
MODELS = (
    Model("DeepSeek-V4-Pro", 7168, 3072, 6, 1, 7168),
    Model("Kimi K3", 3584, 3072, 16, 2, 7168),
)
TOKENS, COPIES = (8192, 16384), (0, 1, 2, 4)


def math_over_comm(
    device: Device, model: Model, tokens: int, copies: int, shared: bool, num_ranks: int = 8
) -> float:
    """FLOPs per communicated byte of one layer on one rank, in FP4-equivalent FLOPs.

    Args:
      device, model: rates and sizes.
      tokens: tokens of a rank.
      copies: expert copies that a rank receives (or sends) in the layer.
      shared: whether the shared expert's FLOPs count too, weighted by `device.shared_weight`.
      num_ranks: ranks of the EP group.
    """
    flops = model.routed_flops(tokens)
    if shared:
        flops += device.shared_weight * model.shared_flops(tokens)
    traffic = model.traffic_bytes(tokens, num_ranks) + copies * model.copy_bytes
    return flops / traffic if traffic else float("inf")


def scenarios(
    devices=DEVICES, models=MODELS, tokens=TOKENS, copies=COPIES, num_ranks: int = 8
) -> list[Scenario]:
    """Every combination, routed only and with the shared expert, in Figure 3's order."""
    rows = []
    for device in devices:
        for shared in (False, True):
            for model in models:
                for count in tokens:
                    for n in copies:
                        ratio = math_over_comm(device, model, count, n, shared, num_ranks)
                        rows.append(
                            Scenario(
                                device.name,
                                model.name,
                                count,
                                n,
                                shared,
                                ratio,
                                device.line,
                                ratio > device.line,
                            )
                        )
    return rows


def layer_times(
    device: Device, model: Model, tokens: int, num_ranks: int = 8, num_slots: int = 4
) -> dict[str, float]:
    """Times and sizes of one layer, in the units that the names say.

    `copies_that_fit` beside the routed experts counts what their time leaves after token traffic;
    `overrun_four_us` is how long four copies outlast them; `bf16_combine_us` is combine alone in
    BF16; `helper_banks_mb` is two banks of `num_slots` slots, `helper_per_layer_gb` a bank a layer.
    """
    routed = model.routed_flops(tokens) / device.flops
    traffic = model.traffic_bytes(tokens, num_ranks) / device.link
    copy = model.copy_bytes / device.link
    combine = model.traffic_bytes(tokens, num_ranks) / 2 / BYTES_PER_ELEMENT * BF16_BYTES
    bank = num_slots * model.copy_bytes
    return {
        "copy_mb": model.copy_bytes / 1e6,
        "routed_us": routed * 1e6,
        "token_traffic_us": traffic * 1e6,
        "copy_us": copy * 1e6,
        "shared_us": device.shared_weight * model.shared_flops(tokens) / device.flops * 1e6,
        "copies_that_fit": (routed - traffic) / copy,
        "overrun_four_us": (traffic + 4 * copy - routed) * 1e6,
        "bf16_combine_us": combine / device.link * 1e6,
        "helper_banks_mb": 2 * bank / 1e6,
        "helper_per_layer_gb": model.num_layers * bank / 1e9,
    }
