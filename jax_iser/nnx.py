"""A Flax NNX module of the MoE layer: router, routed experts, shared experts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_iser import _fits, fp8
from jax_iser.config import WEIGHT_DTYPES, dtype_name
from jax_iser.domain import Domain, DomainHandle, keep_open
from jax_iser.layer import ExpertWeights, moe_layer
from jax_iser.planner import Plan
from jax_iser.reference.layer import moe_layer as reference_layer
from jax_iser.router import check_router_arguments, route, router_logits
from jax_iser.shared_expert import shared_expert

METHODS = ("fused", "reference")
FORCED_ROUTINGS = ("balanced",)


class RoutedBias(nnx.Variable):
    """The router's selection bias `[num_experts] f32`: moved by a balancing rule, no gradient."""


class Fp8Plane(nnx.Variable):
    """A plane of expert weights `[num_experts, bytes] u8` of `quantize_fp8`: not trained."""

    def set_value(self, value, **options):
        """Refuses weights that are not quantised: as bytes they would mean nothing."""
        if getattr(value, "dtype", np.uint8) != np.uint8:
            raise TypeError(
                f"weights of {value.dtype} are assigned to a plane of FP8 bytes; assign what "
                "jax_iser.quantize_fp8 makes of them, or read them by jax_iser.nnx.load_hf"
            )
        super().set_value(value, **options)


class AttachedDomain(nnx.Variable):
    """The handle of a `jax_iser.Domain`; an argument of every compiled program that uses it."""


def balanced_routing(num_tokens, first_token, top_k, num_experts, scale):
    """Ids that load every expert alike: token t's k-th expert is `(t*K + k) mod E`, equal weights.

    Outputs under it mean nothing; it is the yardstick for the time of a balanced layer.
    """
    token = first_token + jnp.arange(num_tokens)[:, None]
    topk_ids = (token * top_k + jnp.arange(top_k)) % num_experts
    return topk_ids.astype(jnp.int32), jnp.full(topk_ids.shape, scale / top_k, jnp.float32)


def plan_telemetry(plan, bundle_bytes: int) -> dict[str, jax.Array]:
    """What a `Plan` did, as small arrays.

    Returns:
      `load_before`, `load` `[P] i32`; `imbalance_before`, `imbalance` f32 (max over mean, 1 with
      no routes); `broadcasts`, `copies` i32 (bundles that crossed to another rank); `copied_bytes`
      f32.
    """
    num_ranks = plan.load.shape[0]
    expert, owner, level, group, _, how = plan.broadcasts.T
    size = num_ranks >> jnp.maximum(level, 0)
    owner_inside = (owner >= group * size) & (owner < (group + 1) * size)
    moves = (expert >= 0) & (how != 2)
    copies = jnp.sum(jnp.where(moves, size - owner_inside, 0)).astype(jnp.int32)

    def imbalance(load):
        mean = load.sum() / num_ranks
        return jnp.where(mean > 0, load.max() / jnp.maximum(mean, 1e-9), 1.0)

    return {
        "load_before": plan.load_before,
        "load": plan.load,
        "imbalance_before": imbalance(plan.load_before),
        "imbalance": imbalance(plan.load),
        "broadcasts": plan.num_broadcasts,
        "copies": copies,
        "copied_bytes": copies.astype(jnp.float32) * bundle_bytes,
    }


class MoE(nnx.Module):
    """Mixture of experts that rebalances itself over the expert-parallel ranks at every call.

    Args:
      hidden_size, intermediate_size: `D`, and `I` of each routed expert (gated MLP, silu).
      num_experts, top_k: experts of the layer, experts a token.
      score_function, num_groups, top_k_groups, routed_scaling_factor, norm_topk_prob: the router;
        see `jax_iser.router.route`.
      routed_bias: adds a selection bias, a `RoutedBias` variable that gradients do not touch.
      num_shared_experts, shared_intermediate_size: shared experts, held as one gated MLP of
        `num_shared_experts * shared_intermediate_size` (default: `intermediate_size` each).
      shared_expert_sms: on GPUs, SMs that its products may use; see `jax_iser.shared_expert`.
      dtype: of the computation (default: the input's), also the Domain's. param_dtype: of the
        expert weights; the router's are f32. weight_dtype: `float8_e4m3fn` keeps the expert weights
        as `Fp8Plane`s, quantised when they are made or loaded; gradients do not touch them.
      mesh, axis: experts are spread over `axis` of `mesh`, and the input's leading dimension with
        them. `mesh=None`: one rank, no `shard_map`, `method="reference"`.
      balance: `"haloq"`, or `"none"`: every route runs at its expert's home (use it to train).
      method: `"fused"` (needs a Domain) or `"reference"` (plain JAX, differentiable). Default:
        `"fused"` with a mesh, else `"reference"`.
      layer: this layer's index; layers take turns with the Domain's helper banks.
      reference_scheme: `scheme` of `jax_iser.reference.fused_moe.fused_moe`.
      rngs: `nnx.Rngs` with a `params` stream.

    Attributes:
      router: `[E, D] f32`.
      gate, up: `[E, I, D]`, as Hugging Face's `*_proj.weight`; FP8 planes `[E, bytes] u8`.
      down: `[E, D, I]`, likewise. `load_hf` reads all of them; `x @ w[e]` weights `[E, D, I]` have
        to be transposed.
      routed_bias: `[E] f32`, or None.
      shared_gate, shared_up, shared_down: `[I, D]`, `[I, D]`, `[D, I]` of all shared experts.

    Under `nnx.capture(..., nnx.Intermediate)` each call records `plan_telemetry`'s arrays, the
    `plan` and `topk_ids`; without it a call changes nothing and costs nothing more.

    Raises:
      ValueError: sizes that do not fit, naming both values.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        score_function: str = "softmax",
        num_groups: int | None = None,
        top_k_groups: int | None = None,
        routed_bias: bool = False,
        routed_scaling_factor: float = 1.0,
        norm_topk_prob: bool = True,
        num_shared_experts: int = 0,
        shared_intermediate_size: int | None = None,
        shared_expert_sms: int | None = None,
        dtype=None,
        param_dtype=jnp.float32,
        weight_dtype=None,
        mesh: jax.sharding.Mesh | None = None,
        axis: str = "ep",
        balance: str = "haloq",
        method: str | None = None,
        layer: int = 0,
        reference_scheme: str = "blocked",
        rngs: nnx.Rngs,
    ):
        check_router_arguments(num_experts, top_k, score_function, num_groups, top_k_groups)
        self.method = _check_method(method, mesh, axis, num_experts)
        if balance not in ("haloq", "none"):
            raise ValueError(f'balance={balance!r} is not one of ("haloq", "none")')
        weight_dtype = dtype_name(weight_dtype)
        _check_weight_dtype(weight_dtype, hidden_size, intermediate_size, reference_scheme)
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_experts, self.top_k = num_experts, top_k
        self.score_function, self.norm_topk_prob = score_function, norm_topk_prob
        self.num_groups, self.top_k_groups = num_groups, top_k_groups
        self.routed_scaling_factor = routed_scaling_factor
        self.dtype, self.mesh, self.axis = dtype, mesh, axis
        self.weight_dtype = weight_dtype
        self.balance, self.layer, self.reference_scheme = balance, layer, reference_scheme
        planes = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=0)
        matrix = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        d, i, e = hidden_size, intermediate_size, num_experts
        shared = num_shared_experts * (shared_intermediate_size or intermediate_size)

        def make(kind, value, sharding=(None,)):
            if mesh is None:
                return kind(value)
            return kind(value, out_sharding=sharding, mesh=mesh)

        def expert_plane(shape):
            plane = planes(rngs.params(), shape, param_dtype)
            if weight_dtype is not None:
                return make(Fp8Plane, fp8.quantize_plane(plane), (axis, None))
            return make(nnx.Param, plane, (axis, None, None))

        def replicated(shape, kind_dtype=param_dtype):
            return make(nnx.Param, matrix(rngs.params(), shape, kind_dtype))

        self.router = replicated((e, d), jnp.float32)
        bias = make(RoutedBias, jnp.zeros(e, jnp.float32)) if routed_bias else None
        self.routed_bias = nnx.data(bias)
        self.gate, self.up = expert_plane((e, i, d)), expert_plane((e, i, d))
        self.down = expert_plane((e, d, i))
        self.has_shared, self.shared_expert_sms = shared > 0, shared_expert_sms
        if self.has_shared:
            self.shared_gate = replicated((shared, d))
            self.shared_up = replicated((shared, d))
            self.shared_down = replicated((d, shared))
        self.domain = nnx.data(None)

    def __call__(
        self,
        x: jax.Array,
        *,
        domain=None,
        layer=None,
        weights_version=None,
        forced_routing: str | None = None,
    ) -> jax.Array:
        """Runs the layer.

        Args:
          x: `[..., D]`; with a mesh its leading dimension is sharded over `axis`, and its tokens
            must be divisible by the ranks. Rows that pad them are routed like any other and change
            none: drop their outputs.
          domain: a `DomainHandle`; default: the one `attach` put here.
          layer: overrides the module's layer index; may be traced (a scan over layers).
          weights_version: i32, with a Domain that is `resident`: another one whenever the weights
            of this layer have changed, or are another model's.
          forced_routing: `"balanced"` ignores the router (`balanced_routing`): for timing only.

        Returns:
          `x`'s shape and dtype.

        Raises:
          ValueError, TypeError: an input that does not fit, `method="fused"` without a Domain, or
            with one of other devices or of another dtype.
        """
        if x.shape[-1:] != (self.hidden_size,):
            raise ValueError(f"x has shape {x.shape}, expected [..., {self.hidden_size}]")
        if forced_routing is not None and forced_routing not in FORCED_ROUTINGS:
            raise ValueError(f"forced_routing={forced_routing!r} is not one of {FORCED_ROUTINGS}")
        if domain is None and self.domain is not None:
            domain = self.domain.get_value()
        if self.method == "fused" and domain is None:
            raise ValueError(
                'method="fused" needs a Domain: pass domain=domain.handle, or call '
                'jax_iser.nnx.attach(model, domain), or use method="reference"'
            )
        layer = jnp.int32(self.layer if layer is None else layer)
        given = jax.dtypes.canonicalize_dtype(x.dtype)  # NumPy's f64 is f32 in jax
        dtype = given if self.dtype is None else jnp.dtype(self.dtype)
        self._check_call(x, dtype, domain, weights_version)
        tokens = x.astype(dtype).reshape(-1, self.hidden_size)
        version = jnp.int32(0 if weights_version is None else weights_version)
        y, plan, topk_ids = _run(
            _Settings.of(self, forced_routing),
            tokens,
            *self._weights(dtype),
            domain,
            layer,
            version,
        )
        self._sow(plan, topk_ids, dtype)
        return y.reshape(x.shape).astype(given)

    def _check_call(self, x, dtype, domain, weights_version):
        if domain is not None:
            if not isinstance(domain, DomainHandle):
                raise TypeError(
                    f"domain is a {type(domain).__name__}, expected a DomainHandle; pass "
                    "domain.handle"
                )
            _fits.check_alive(domain)
            _fits.check_devices(self, domain, "this MoE")
            if self.method == "fused":
                _fits.check_dtype(self, dtype, domain.config, "this MoE")
                if domain.config.resident and weights_version is None:
                    raise ValueError(
                        "the Domain keeps replicas from call to call (resident=True), and cannot "
                        "see that weights have changed: pass weights_version=, or make the Domain "
                        "with resident=False"
                    )
        if self.mesh is not None:
            each = 1 if domain is None else domain.config.ranks_per_device
            _fits.check_divisible(x.shape, self.mesh.shape[self.axis], each, self.axis)

    def _weights(self, dtype):
        """Replicated weights, and the expert planes, as the computation takes them."""
        shared = None
        if self.has_shared:
            names = (self.shared_gate, self.shared_up, self.shared_down)
            shared = tuple(p[...].astype(dtype) for p in names)
        bias = None if self.routed_bias is None else self.routed_bias[...]
        planes = (p[...] for p in (self.gate, self.up, self.down))
        experts = tuple(p if fp8.is_fp8(p) else p.astype(dtype) for p in planes)
        scale = jnp.float32(1) * self.routed_scaling_factor
        return (self.router[...], bias, shared, scale), experts

    def _sow(self, plan, topk_ids, dtype):
        """Records telemetry for `nnx.capture`; outside of it a module must not change."""
        if not hasattr(self, "__captures__"):
            return
        sizes = (self.intermediate_size, self.hidden_size)
        if self.weight_dtype is None:
            plane_bytes = sizes[0] * sizes[1] * jnp.dtype(dtype).itemsize
        else:
            plane_bytes = fp8.plane_bytes(*sizes)
        values = plan_telemetry(plan, 3 * plane_bytes) | {"plan": plan, "topk_ids": topk_ids}
        for name, value in values.items():
            self.sow(nnx.Intermediate, name, value)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """All that a call depends on beside its arrays; modules of equal settings share a program."""

    mesh: jax.sharding.Mesh | None
    axis: str
    method: str
    balance: str
    num_experts: int
    top_k: int
    score_function: str
    num_groups: int | None
    top_k_groups: int | None
    norm_topk_prob: bool
    shared_expert_sms: int | None
    reference_scheme: str
    forced_routing: str | None

    @classmethod
    def of(cls, module: MoE, forced_routing: str | None) -> _Settings:
        names = {field.name for field in dataclasses.fields(cls)} - {"forced_routing"}
        values = {name: getattr(module, name) for name in names}
        return cls(**values, forced_routing=forced_routing)


# Jitted, or calls and gradients outside jit would run op by op.
@functools.partial(jax.jit, static_argnums=0)
def _run(settings: _Settings, tokens, replicated, experts, domain, layer, version):
    """The layer on the tokens and experts of all devices: `(y, Plan, topk_ids)`."""
    on_device = functools.partial(_on_device, settings)
    if settings.mesh is None:
        return on_device(tokens, replicated, experts, domain, layer, version)
    sharded = P(settings.axis)
    return jax.shard_map(
        on_device,
        mesh=settings.mesh,
        in_specs=(sharded, P(), sharded, sharded, P(), P()),
        out_specs=(sharded, Plan.specs(settings.axis), sharded),
        axis_names={settings.axis},
        check_vma=False,
    )(tokens, replicated, experts, domain, layer, version)


def _on_device(settings: _Settings, tokens, replicated, experts, domain, layer, version):
    """The layer on the tokens and experts of one device."""
    router, bias, shared, scale = replicated
    options = {
        "layer": layer,
        "balance": settings.balance,
        "axis_name": None if settings.mesh is None else settings.axis,
    }
    if shared is not None:
        sms = settings.shared_expert_sms
        options["shared_expert"] = lambda t: shared_expert(t, *shared, sms=sms)
    ids, weights = _route(settings, tokens, router, bias, scale)
    if settings.method == "reference":
        options["scheme"] = settings.reference_scheme
        y, plan = reference_layer(tokens, ids, weights, experts, domain, **options)
    else:
        options["weights_version"] = version
        y, plan = moe_layer(tokens, ids, weights, ExpertWeights(*experts), domain, **options)
    return y, plan, ids


def _route(settings: _Settings, tokens, router, bias, scale):
    """`topk_ids` and `topk_weights` of one device's tokens."""
    if settings.forced_routing is None:
        return route(
            router_logits(tokens, router),
            top_k=settings.top_k,
            score_function=settings.score_function,
            num_groups=settings.num_groups,
            top_k_groups=settings.top_k_groups,
            routed_bias=bias,
            routed_scaling_factor=scale,
            norm_topk_prob=settings.norm_topk_prob,
        )
    device = 0 if settings.mesh is None else jax.lax.axis_index(settings.axis)
    return balanced_routing(
        tokens.shape[0],
        device * tokens.shape[0],
        settings.top_k,
        settings.num_experts,
        scale,
    )


def _check_method(method, mesh, axis, num_experts):
    if method is None:
        method = "reference" if mesh is None else "fused"
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not one of {METHODS}")
    if mesh is None:
        if method == "fused":
            raise ValueError('method="fused" needs a mesh: pass mesh=, or use method="reference"')
        return method
    if axis not in mesh.shape:
        raise ValueError(f'mesh has axes {tuple(mesh.axis_names)}, none named axis="{axis}"')
    if num_experts % mesh.shape[axis]:
        raise ValueError(
            f"num_experts={num_experts} is not divisible by the {mesh.shape[axis]} devices of "
            f'axis "{axis}"; pad the experts or use an axis size that divides {num_experts}'
        )
    return method


def _check_weight_dtype(weight_dtype, hidden_size, intermediate_size, reference_scheme):
    if weight_dtype not in WEIGHT_DTYPES:
        raise ValueError(f"weight_dtype={weight_dtype!r} is not one of {WEIGHT_DTYPES}")
    if weight_dtype is None:
        return
    fp8.check_sizes(hidden_size, intermediate_size, "hidden_size", "intermediate_size")
    if reference_scheme == "dense":
        raise ValueError('reference_scheme="dense" takes no FP8 weights; use "blocked"')


def attach(model: nnx.Module, domain: Domain | DomainHandle | None) -> None:
    """Gives every `MoE` of `model` the handle of `domain` (a Domain or a handle; None detaches).

    The handle is a variable of the module: it travels into `nnx.jit` with the model's state, so a
    closed and remade Domain is attached again without recompilation. It means nothing to another
    process: attach a restored model again. The Domain stays alive until it is closed, even where
    the caller keeps no reference to it; a detached one does too.

    Raises:
      ValueError: no MoE in the model, a stacked one, a closed Domain, or one that was made for
        other sizes, layers or devices than a module has, naming both values.
      TypeError: a `domain` that is none, a model that is no NNX module, or another dtype.
    """
    handle = _handle_of(domain)
    modules = _modules_of(model)
    if handle is not None:
        for name, module in modules.items():
            _fits.check_module(module, handle, name)
        _fits.check_layers(modules, handle.config)
        keep_open(handle)
    for module in modules.values():
        module.domain = None if handle is None else AttachedDomain(_copy_of(handle))


def place(model: nnx.Module, domain: Domain) -> None:
    """Moves every `MoE`'s expert weights to where all processes of `domain` read them in place.

    For CPU Domains of several processes: without it, owners copy each bundle that other processes
    pull aside first. Elsewhere it is a plain placement over the mesh. All processes of the Domain
    call it. Weights that are assigned or updated later are not placed: call it again. `nnx.jit`
    gives a module its variables anew at each call; to keep placed ones, pass the module's state to
    `jax.jit` (`nnx.split`, `nnx.merge`).

    Raises:
      ValueError, TypeError: as `attach`, or weights that `Domain.place` refuses.
    """
    if not isinstance(domain, Domain):
        raise TypeError(f"domain is a {type(domain).__name__}, expected a jax_iser.Domain")
    handle = _handle_of(domain)
    modules = _modules_of(model)
    for name, module in modules.items():
        _fits.check_module(module, handle, name)
    for module in modules.values():
        for variable in (module.gate, module.up, module.down):
            variable.set_value(domain.place(variable[...]))


def _modules_of(model) -> dict[str, MoE]:
    """The model's MoE modules by how errors name them."""
    modules = {
        "MoE " + ".".join(map(str, path)) if path else "this MoE": module
        for path, module in nnx.iter_graph(model)
        if isinstance(module, MoE)
    }
    if not modules:
        raise _no_module(model)
    return modules


def _copy_of(handle):
    """A module's own: a program that is given a model to overwrite overwrites this."""
    return dataclasses.replace(handle, words=jnp.copy(handle.words))


def _handle_of(domain):
    if isinstance(domain, Domain):
        if not domain.is_open:
            raise ValueError("this Domain is closed; make a new one and attach that")
        domain = domain.handle
    if isinstance(domain, DomainHandle):
        _fits.check_alive(domain)
    elif domain is not None:
        raise TypeError(
            f"domain is a {type(domain).__name__}, expected a jax_iser.Domain, its handle, or None "
            "to detach"
        )
    return domain


def _no_module(model):
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if isinstance(model, nnx.Module):
        return ValueError(
            f"the model, a {kind}, has no jax_iser.nnx.MoE: nothing to attach; put one in place of "
            "its MoE layers first"
        )
    return TypeError(
        f"the model is a {kind}, expected a flax.nnx.Module with a jax_iser.nnx.MoE in it; from "
        "Flax Linen, which keeps no state in modules, call jax_iser.moe_layer"
    )


def load_hf(moe: MoE, tensors: Mapping[str, jax.Array], prefix: str = "") -> None:
    """Loads one MoE block from tensors with Hugging Face names.

    Args:
      moe: the module; its shapes and dtypes decide what is expected. With `weight_dtype` experts
        are quantised one by one.
      tensors: by name: `mlp.gate.weight` `[E, D]`, `mlp.gate.e_score_correction_bias` `[E]`,
        `mlp.experts.N.{gate,up,down}_proj.weight`, `mlp.shared_expert(s).*_proj.weight`.
      prefix: what stands before `mlp.`, such as `model.layers.3.`.

    Raises:
      ValueError, TypeError: a tensor that is missing, has another shape or holds integers, or a
        gate on the shared expert.
    """

    def get(name, shape):
        if prefix + name not in tensors:
            raise ValueError(f"{prefix + name} is missing from the tensors given")
        value = jnp.asarray(tensors[prefix + name])
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"{prefix + name} is {value.dtype}, expected floats; dequantise the tensors first"
            )
        if value.shape != shape:
            raise ValueError(f"{prefix + name} has shape {value.shape}, expected {shape}")
        return value

    if f"{prefix}mlp.shared_expert_gate.weight" in tensors:
        raise ValueError(
            f"{prefix}mlp.shared_expert_gate.weight: gated shared experts are not here"
        )
    d, i = moe.hidden_size, moe.intermediate_size
    shapes = {"gate": (i, d), "up": (i, d), "down": (d, i)}
    convert = (lambda a: a) if moe.weight_dtype is None else fp8.quantize_plane
    for plane, shape in shapes.items():
        names = (f"mlp.experts.{e}.{plane}_proj.weight" for e in range(moe.num_experts))
        _assign(getattr(moe, plane), jnp.stack([convert(get(name, shape)) for name in names]))
    _assign(moe.router, get("mlp.gate.weight", (moe.num_experts, d)))
    if moe.routed_bias is not None:
        name = "mlp.gate.e_score_correction_bias"
        _assign(moe.routed_bias, get(name, (moe.num_experts,)))
    if moe.has_shared:
        plural = f"{prefix}mlp.shared_experts.gate_proj.weight" in tensors
        stem = "mlp.shared_experts" if plural else "mlp.shared_expert"
        for plane in shapes:
            param = getattr(moe, f"shared_{plane}")
            _assign(param, get(f"{stem}.{plane}_proj.weight", param.shape))


def _assign(variable, value):
    """Replaces a variable's value, keeping its dtype and sharding."""
    old = variable.get_value()
    value = value.astype(old.dtype)
    variable.set_value(jax.device_put(value, old.sharding) if hasattr(old, "sharding") else value)
