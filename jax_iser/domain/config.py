"""The sizes and knobs of a Domain, validated once and alike on all ranks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator

import numpy as np

from jax_iser.experts.activation import SILU, Activation
from jax_iser.experts.bundle import BundleLayout, bundle_layout
from jax_iser.experts.formats import FORMATS, WeightFormat, format_of
from jax_iser.experts.formats import WEIGHT_DTYPES as _ALIASES
from jax_iser.limits import MAX_LAYERS
from jax_iser.plan.knobs import check_plan_knobs

DTYPES = {"float32": 4, "bfloat16": 2}
WEIGHT_DTYPES = (None, *_ALIASES)
BANKS = ("shared", "per_layer")
PLATFORMS = ("cpu", "cuda")
MAX_BYTES = 1 << 50  # far beyond any host: what offsets are computed with is much wider


def dtype_name(dtype) -> str | None:
    """The name of what `jnp.dtype` takes; anything else is passed through."""
    try:
        return dtype if dtype is None else np.dtype(dtype).name
    except TypeError:
        return dtype


def check_integer(name: str, value, *, least: int | None = None) -> int:
    """The value as an `int`.

    Raises:
      TypeError: a value that is no integer; `True` and `2.0` are none.
      ValueError: one below `least`.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} is not an integer")
    value = operator.index(value)
    if least is not None and value < least:
        raise ValueError(f"{name}={value} is below {least}")
    return value


def check_flag(name: str, value) -> None:
    """Raises TypeError for what is neither True nor False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} is not True or False")


@dataclasses.dataclass(frozen=True)
class DomainConfig:
    """Sizes, layout and knobs of a Domain; hashable, part of every compiled program.

    Attributes:
      num_ranks: ranks `P` of the EP group, 1 to 72.
      num_experts: experts `E` of a layer, divisible by `num_ranks`, at most 1,024.
      top_k: experts `K` a token goes to.
      hidden_size, intermediate_size: `D` and `I` of an expert.
      max_tokens_per_rank: the most tokens a rank brings to a call.
      ranks_per_device: ranks that share a device; they are consecutive.
      num_helper_slots: helper slots `S` of a rank, 0 to 16.
      dtype: of tokens and outputs, float32 or bfloat16; kept by its name.
      weight_dtype: None, or float8_e4m3fn, an alias of `weight_format="float8_block128"`.
      weight_format: of expert weights. None: elements of `dtype`, `"float32"` or `"bfloat16"`.
        `"float8_block128"`: planes of `quantize_fp8`; needs `D` and `I` that are multiples of 64.
      token_format: what tokens are dispatched in. None: as the weight format has it,
        `"float8_row128"` with `"float8_block128"`, else `dtype`.
      activation: an `Activation` or the name of one, between the products of an expert.
      expert_biases: experts have f32 biases of gate, up and down.
      num_layers: layers that use the Domain; `layer` operands are below it.
      bank: `"shared"`: layer i uses helper bank `i mod 2`; `"per_layer"`: its own.
      min_group_size: ranks of the smallest group below the all-rank one: 4, 2 or 1.
      min_routes: a placement that would move fewer routes is skipped.
      gain_threshold: nothing is planned below this imbalance, in thousandths.
      resident: replicas stay between calls and are not copied again while a plan wants them in
        the same place; needs `bank="per_layer"`.
      copy_rule: `"owner_direct"`, `"sami"`, or `"per_slot"` (the paper's mix of both).
      max_routes_per_rank: rows a rank computes at a time; more are computed in waves. Default:
        `2 * max_tokens_per_rank * top_k`.
      timeout_s: limit of each wait for a peer.
      startup_timeout_s: the same in the first call. Default: `timeout_s` within one process, 600
        across processes, which may have to compile first.
      poison: fill token, combine and output buffers with NaN before each call (for tests).
      copy_sms: SMs that copy replicas. GPUs alone; default 8.
      platform: `"cpu"` or `"cuda"`, of the mesh's devices; the Domain sets it.
    """

    num_ranks: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    max_tokens_per_rank: int
    ranks_per_device: int = 1
    num_helper_slots: int = 4
    dtype: str = "float32"
    weight_dtype: str | None = None
    weight_format: str | None = None
    token_format: str | None = None
    activation: Activation = SILU
    expert_biases: bool = False
    num_layers: int = 1
    bank: str = "shared"
    min_group_size: int = 4
    min_routes: int = 0
    gain_threshold: int = 0
    resident: bool = False
    copy_rule: str = "owner_direct"
    max_routes_per_rank: int | None = None
    timeout_s: float = 120.0
    startup_timeout_s: float | None = None
    poison: bool = False
    copy_sms: int | None = None
    platform: str = "cpu"

    def __post_init__(self):
        self._check_types()
        check_plan_knobs(
            self.num_ranks,
            self.num_experts,
            self.num_helper_slots,
            self.min_group_size,
            self.min_routes,
            self.gain_threshold,
            self.copy_rule,
        )
        self._check_choices()
        self._check_sizes()
        if self.max_routes_per_rank is None:
            routes = max(1, 2 * self.max_tokens_per_rank * self.top_k)
            object.__setattr__(self, "max_routes_per_rank", routes)

    def _check_types(self):
        """Integers become `int`, dtypes names, so that equal configurations have equal hashes."""
        for name in ("dtype", "weight_dtype"):
            object.__setattr__(self, name, dtype_name(getattr(self, name)))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type.startswith("int") and value is not None:
                value = check_integer(field.name, value)
                if not -(2**31) <= value < 2**31:
                    raise ValueError(f"{field.name}={value} is no 32-bit integer; lower it")
                object.__setattr__(self, field.name, value)
            elif field.type == "bool":
                check_flag(field.name, value)
                object.__setattr__(self, field.name, bool(value))
            elif field.type.startswith("float") and isinstance(value, (str, bool)):
                raise TypeError(f"{field.name}={value!r} is not a number of seconds")

    def _check_sizes(self):
        names = ("top_k", "hidden_size", "intermediate_size", "ranks_per_device", "num_layers")
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is below 1")
        sizes = (self.hidden_size, self.intermediate_size)
        self.format.check_sizes(*sizes, "hidden_size", "intermediate_size")
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"num_layers={self.num_layers} exceeds {MAX_LAYERS}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} exceeds num_experts={self.num_experts}")
        if self.max_tokens_per_rank < 0:
            raise ValueError(f"max_tokens_per_rank={self.max_tokens_per_rank} is below 0")
        if self.num_ranks % self.ranks_per_device:
            raise ValueError(
                f"num_ranks={self.num_ranks} is not divisible by "
                f"ranks_per_device={self.ranks_per_device}"
            )
        routes = self.num_ranks * self.max_tokens_per_rank * self.top_k
        if routes >= 2**31:
            raise ValueError(
                f"{self.num_ranks} ranks x {self.max_tokens_per_rank} tokens x top_k={self.top_k} "
                f"are {routes} routes a call, at most {2**31 - 1} are taken; lower "
                "max_tokens_per_rank"
            )
        tokens = self.max_tokens_per_rank * (1 + self.top_k) * self.hidden_size * 4
        helpers = self.num_layers * self.num_helper_slots * self.bundle_bytes
        if (tokens + helpers + self.num_experts * self.bundle_bytes) * self.num_ranks > MAX_BYTES:
            raise ValueError(
                f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
                f"max_tokens_per_rank={self.max_tokens_per_rank} and num_layers={self.num_layers} "
                f"ask for more than {MAX_BYTES >> 40} TiB; lower one of them"
            )

    def _check_choices(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        self._check_formats()
        if self.bank not in BANKS:
            raise ValueError(f"bank={self.bank!r} is not one of {', '.join(BANKS)}")
        if self.resident and self.bank != "per_layer":
            raise ValueError(
                f"resident=True needs bank='per_layer', got bank={self.bank!r}: shared banks are "
                "overwritten by the next layers"
            )
        if self.platform not in PLATFORMS:
            raise ValueError(f"platform={self.platform!r} is not one of {', '.join(PLATFORMS)}")
        if self.copy_sms is not None and not (self.platform == "cuda" and 1 <= self.copy_sms <= 64):
            raise ValueError(
                f"copy_sms={self.copy_sms} on platform {self.platform}: GPUs take 1 to 64, CPUs "
                "have none; leave it out there"
            )
        if self.max_routes_per_rank is not None and self.max_routes_per_rank < 1:
            raise ValueError(f"max_routes_per_rank={self.max_routes_per_rank} is below 1")
        for name in ("timeout_s", "startup_timeout_s"):
            value = getattr(self, name)
            if value is None and name == "startup_timeout_s":
                continue
            if value is None or not 0 < value <= 1e9:
                raise ValueError(f"{name}={value} is outside (0, 1e9] seconds")

    def _check_formats(self):
        """Names what was left out, so that equal configurations have equal hashes."""
        weight_format = format_of(self.weight_format, self.dtype, self.weight_dtype)
        weight_format.check_dtype(self.dtype)
        token_format = self.token_format or weight_format.token_format
        if token_format != weight_format.token_format:
            raise ValueError(
                f"token_format={token_format!r} does not go with weight_format="
                f"{weight_format.name!r}, which takes tokens in {weight_format.token_format!r}; "
                "leave token_format out"
            )
        object.__setattr__(self, "weight_format", weight_format.name)
        object.__setattr__(self, "weight_dtype", weight_format.weight_dtype)
        object.__setattr__(self, "token_format", token_format)
        object.__setattr__(self, "activation", Activation.of(self.activation))

    @property
    def format(self) -> WeightFormat:
        """The object behind `weight_format`."""
        assert self.weight_format is not None  # the constructor has set it
        return FORMATS[self.weight_format]

    @functools.cached_property
    def bundle(self) -> BundleLayout:
        """The planes of one expert."""
        sizes = (self.hidden_size, self.intermediate_size)
        return bundle_layout(self.format, *sizes, self.expert_biases)

    def startup_limit_s(self, is_multi_process: bool) -> float:
        """Seconds that a wait of the first call may take."""
        if self.startup_timeout_s is not None:
            return self.startup_timeout_s
        return 600.0 if is_multi_process else self.timeout_s

    @property
    def digest(self) -> int:
        """A 63-bit number, alike on every host, that no other configuration has."""
        digest = hashlib.sha256(repr(dataclasses.astuple(self)).encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    @property
    def num_home(self) -> int:
        """Home experts `H` of a rank."""
        return self.num_experts // self.num_ranks

    @property
    def num_devices(self) -> int:
        """Devices on the Domain's axis."""
        return self.num_ranks // self.ranks_per_device

    @property
    def num_banks(self) -> int:
        """Helper banks of a rank."""
        return self.num_layers if self.bank == "per_layer" else min(2, self.num_layers)

    @property
    def bundle_bytes(self) -> int:
        """Bytes of one expert in a helper slot: its planes, each at a multiple of 128 bytes."""
        return self.bundle.num_bytes
