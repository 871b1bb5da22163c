"""Where checkpoints with Hugging Face's names keep the variables of an `MoE`.

A family of other names is a few more sources in `LAYOUT`; `fused_layout` and `part_of` know tensors
that hold all experts, or gate and up in one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

BLOCKS = ("mlp.", "block_sparse_moe.")  # what all names of a block begin with, after the prefix
GATE_UP_ORDERS = ("halves", "interleaved")
_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"


@dataclasses.dataclass(frozen=True)
class Source:
    """One place of a variable.

    Attributes:
      name: after the block's own name; `{expert}` stands for each expert's number.
      half: 0 or 1 where the tensor holds gate and up, in this order.
    """

    name: str
    half: int | None = None

    @property
    def is_fused(self) -> bool:
        """Whether one tensor holds all experts."""
        return self.name.startswith("experts.") and "{expert}" not in self.name


@dataclasses.dataclass(frozen=True)
class Row:
    """Where a variable of the module comes from.

    Attributes:
      variable: an attribute of `MoE`.
      sources: alternatives; the first that the checkpoint has is read.
    """

    variable: str
    sources: tuple[Source, ...]


def _row(variable, *names) -> Row:
    return Row(variable, tuple(Source(name) for name in names))


def _expert_row(plane, mixtral_name, fused, half) -> Row:
    names = (f"experts.{{expert}}.{plane}_proj.weight", f"experts.{{expert}}.{mixtral_name}.weight")
    return Row(plane, (*map(Source, names), Source(fused, half)))


def _bias_row(plane, fused, half) -> Row:
    one_each = Source(f"experts.{{expert}}.{plane}_proj.bias")
    return Row(f"{plane}_bias", (one_each, Source(f"{fused}_bias", half)))


_HALVES = {"gate": (_GATE_UP, 0), "up": (_GATE_UP, 1), "down": (_DOWN, None)}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
LAYOUT = (
    _row("router", "gate.weight", "router.weight"),
    _row("router_bias", "gate.bias", "router.bias"),
    _row("routed_bias", "gate.e_score_correction_bias"),
    *(_expert_row(plane, _MIXTRAL[plane], *_HALVES[plane]) for plane in _HALVES),
    *(_bias_row(plane, *_HALVES[plane]) for plane in _HALVES),
    *(
        _row(
            f"shared_{plane}",
            f"shared_experts.{plane}_proj.weight",
            f"shared_expert.{plane}_proj.weight",
        )
        for plane in _HALVES
    ),
    _row("shared_expert_gate", "shared_expert_gate.weight"),
)

# Why a tensor is left over, by a pattern of its name after the block's own, and what to do.
REMEDIES: tuple[tuple[str, Callable, str], ...] = (
    (
        "gate.e_score_correction_bias",
        lambda moe: moe.routed_bias is None,
        "make the MoE with routed_bias=True",
    ),
    ("gate.bias", lambda moe: moe.router_bias is None, "make the MoE with router_bias=True"),
    ("router.bias", lambda moe: moe.router_bias is None, "make the MoE with router_bias=True"),
    (
        "shared_expert_gate.weight",
        lambda moe: moe.shared_expert_gate is None,
        "make the MoE with shared_expert_gate=True",
    ),
    (
        "shared_expert*",
        lambda moe: not moe.has_shared,
        "make the MoE with num_shared_experts=",
    ),
    (
        "*.input_scale",
        lambda moe: True,
        "tokens are scaled as they come; leave static scales out by ignore=",
    ),
    ("shared_expert*.bias", lambda moe: True, "shared experts with biases are not supported"),
    (
        "experts.*bias",
        lambda moe: not moe.expert_biases,
        "make the MoE with expert_biases=True",
    ),
)


@dataclasses.dataclass(frozen=True)
class FusedLayout:
    """How tensors of all experts lie.

    Attributes:
      is_transposed: gate and up are `[E, D, 2I]`, down `[E, I, D]`; else `[E, 2I, D]`, `[E, D, I]`.
      is_interleaved: gate and up take turns, else the gate's rows come first.
    """

    is_transposed: bool
    is_interleaved: bool


def fused_layout(
    tensors: Mapping[str, np.ndarray], stem: str, sizes: tuple[int, int, int], order: str | None
) -> FusedLayout:
    """The layout of fused tensors, from their shapes.

    Args:
      tensors: those that are fused, by their names after `stem`, which errors begin with.
      sizes: `E`, `D` and `I`.
      order: `"halves"`, `"interleaved"`, or None: interleaved where the tensors are transposed and
        have biases, as in gpt-oss, halves where they are not transposed.

    Raises:
      ValueError: shapes that are of no layout, or a layout that they leave open.
    """
    experts, hidden, inner = sizes
    shapes = {
        _GATE_UP: ((experts, 2 * inner, hidden), (experts, hidden, 2 * inner)),
        _DOWN: ((experts, hidden, inner), (experts, inner, hidden)),
    }
    found = {name: tensors[name].shape for name in shapes if name in tensors}
    for name, shape in found.items():
        if shape not in shapes[name]:
            raise ValueError(
                f"{stem}{name} has shape {shape}, expected {shapes[name][0]} or, transposed, "
                f"{shapes[name][1]}"
            )
    turns = [t for t in (False, True) if all(s == shapes[n][t] for n, s in found.items())]
    described = " and ".join(f"{stem}{name} {shape}" for name, shape in found.items())
    if not turns:
        raise ValueError(f"{described}: one is transposed, the other is not; transpose one of them")
    if len(turns) == 2 and found:
        raise ValueError(
            f"{described} may be transposed or not; give tensors of single experts instead"
        )
    is_transposed = turns[0]
    if order is None and is_transposed and _GATE_UP in found and f"{_GATE_UP}_bias" not in tensors:
        raise ValueError(
            f"{described}: some models store gate and up of this shape in halves, others "
            'interleaved; pass gate_up_order="halves" or gate_up_order="interleaved"'
        )
    is_interleaved = is_transposed if order is None else order == "interleaved"
    return FusedLayout(is_transposed, is_interleaved)


def part_of(array: np.ndarray, half: int | None, layout: FusedLayout) -> np.ndarray:
    """Gate, up or down, `[rows, columns]` or a bias `[rows]`, of one expert's part of a tensor."""
    if layout.is_transposed and array.ndim == 2:
        array = array.T
    if half is None:
        return array
    if layout.is_interleaved:
        return array[half::2]
    size = array.shape[0] // 2
    return array[half * size : (half + 1) * size]
