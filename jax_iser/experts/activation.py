"""What stands between an expert's first two products and its third: `h = act(gate, up)`."""

from __future__ import annotations

import dataclasses
import math

KINDS = ("silu", "gelu_tanh", "clamped_swiglu")  # in the order of ffi/core/activation.h
_GELU_INNER, _GELU_CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


@dataclasses.dataclass(frozen=True)
class Activation:
    """A gated activation and its parameters; hashable, part of a `DomainConfig`.

    - `silu`: `gate * sigmoid(gate) * up`
    - `gelu_tanh`: `gelu(gate) * up`, by the approximation with tanh
    - `clamped_swiglu`: `g * sigmoid(alpha * g) * (u + offset)` with `g = min(gate, limit)` and
      `u = clip(up, -limit, limit)`

    Attributes:
      kind: one of `KINDS`.
      limit, alpha, offset: of `clamped_swiglu` alone, and required to be left out elsewhere. The
        defaults are those of gpt-oss.

    Raises:
      ValueError, TypeError: an unknown kind, a parameter that the kind does not take, a `limit`
        that is not above 0.

    Example:
      >>> Activation.of("silu").kind
      'silu'
      >>> Activation("clamped_swiglu", limit=10.0).alpha
      1.702
    """

    kind: str = "silu"
    limit: float | None = None
    alpha: float | None = None
    offset: float | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"activation={self.kind!r} is not one of {', '.join(KINDS)}")
        for name, default in (("limit", 7.0), ("alpha", 1.702), ("offset", 1.0)):
            value = getattr(self, name)
            if self.kind != "clamped_swiglu":
                if value is not None:
                    raise ValueError(f"activation {self.kind!r} takes no {name}={value!r}")
                continue
            value = default if value is None else value
            if isinstance(value, (bool, str)) or not math.isfinite(value):
                raise TypeError(f"{name}={value!r} of an activation is not a finite number")
            object.__setattr__(self, name, float(value))
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"limit={self.limit} of an activation is not above 0")

    @classmethod
    def of(cls, activation: str | Activation) -> Activation:
        """`activation` itself, or the one of that name with its default parameters."""
        return activation if isinstance(activation, Activation) else cls(activation)

    @property
    def index(self) -> int:
        """As ffi/core/activation.h counts the kinds."""
        return KINDS.index(self.kind)

    def __call__(self, gate, up, np=None):
        """`act(gate, up)` in the arguments' dtype, elementwise.

        Args:
          gate, up: arrays of one shape.
          np: the module to compute with: `numpy`, or `jax.numpy` (the default).
        """
        if np is None:
            import jax.numpy as np
        if self.kind == "silu":
            return _times_sigmoid(gate, gate, np) * up
        if self.kind == "gelu_tanh":
            inner = _GELU_INNER * (gate + _GELU_CUBIC * gate * gate * gate)
            return _times_sigmoid(gate, inner, np) * up
        assert self.limit is not None  # the constructor has set them
        assert self.alpha is not None
        gate = np.minimum(gate, self.limit)
        up = np.clip(up, -self.limit, self.limit)
        return _times_sigmoid(gate, self.alpha * gate, np) * (up + self.offset)


def _times_sigmoid(gate, x, np):
    """`gate * sigmoid(x)`."""
    if np.__name__ == "jax.numpy":
        import jax

        return gate * jax.nn.sigmoid(x)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-x))


SILU = Activation("silu")
