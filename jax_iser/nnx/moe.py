"""`MoE`: router, routed experts and shared experts as one Flax NNX module."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_iser.domain.config import check_flag, check_integer, dtype_name
from jax_iser.experts.activation import Activation
from jax_iser.experts.bundle import PLANES, BundleLayout, bundle_layout
from jax_iser.experts.formats import FORMATS, format_of
from jax_iser.experts.weights import ExpertWeights
from jax_iser.layer import moe_layer
from jax_iser.methods import METHODS as METHODS
from jax_iser.methods import find_method, method_name
from jax_iser.methods.base import check_balance
from jax_iser.methods.fused.checks import as_i32, check_handle
from jax_iser.methods.portable.fused_moe import SCHEMES
from jax_iser.nnx import fits, meshes, names
from jax_iser.nnx.telemetry import balanced_routing, plan_telemetry
from jax_iser.nnx.variables import ExpertBias, ExpertPlane, Fp8Plane, RoutedBias
from jax_iser.plan.types import Plan
from jax_iser.router import check_router_arguments, route, router_logits
from jax_iser.shared_expert import check_sms, shared_expert

FORCED_ROUTINGS = ("balanced",)


class MoE(nnx.Module):
    """Mixture of experts that rebalances itself over the expert-parallel ranks at every call.

    Args:
      hidden_size, intermediate_size: `D`, and `I` of each routed expert, a gated MLP.
      num_experts, top_k: experts of the layer, experts per token.
      activation: an `Activation` or its name (`"silu"`, `"gelu_tanh"`, `"clamped_swiglu"`), of the
        routed experts and the shared one.
      expert_biases: the routed experts have biases of gate, up and down.
      router_bias: the router's logits have a bias, which enters choice and weights.
      score_function, num_groups, top_k_groups, routed_scaling_factor, norm_topk_prob: the router;
        see `jax_iser.router.route`.
      routed_bias: adds a selection bias, a `RoutedBias` variable that gradients do not touch.
      num_shared_experts, shared_intermediate_size: shared experts, held as one gated MLP of
        `num_shared_experts * shared_intermediate_size` (default: `intermediate_size` each).
      shared_expert_gate: the shared experts' output is multiplied by `sigmoid(x @ g)`, as in
        Qwen2-MoE.
      shared_expert_sms: on GPUs, SMs that its products may use; see `jax_iser.shared_expert`.
      dtype: of the computation (default: the input's), also the Domain's. param_dtype: of the
        expert weights; the router's and all biases are f32.
      weight_format: of the expert weights: None for elements of `dtype`, or a name of a format,
        see `DomainConfig`. `"float8_block128"` keeps them as `Fp8Plane`s, quantised when they are
        made or loaded; gradients do not touch them. `weight_dtype="float8_e4m3fn"` is its alias.
      mesh, axis: experts are spread over `axis` of `mesh`, and the input's tokens with them; its
        axes may be Auto or Explicit. `mesh=None` takes the mesh of `jax.set_mesh`. Without that
        the module is one rank, with no `shard_map` and `method="portable"`.
      balance: `"haloq"`, or `"none"`: every route runs at its expert's home (use it to train).
      method: `"fused"` (needs a Domain), `"portable"` (plain JAX, differentiable; `"reference"` is
        an alias), or `"dense"` (the same, but every expert runs on every token: for small models,
        without a mesh). Default: `"fused"` with a mesh, else `"portable"`.
      layer: this layer's number in the Domain, from 0. None: `attach` numbers the layers of a
        model. Layers take turns with the Domain's helper banks.
      reference_scheme: deprecated; `"dense"` means `method="dense"`.
      rngs: `nnx.Rngs` with a `params` stream.
      aliases: field names of Hugging Face's configs beside those above: `num_experts_per_tok`,
        `moe_intermediate_size`, `num_local_experts`, `n_routed_experts`, `n_group`, `topk_group`,
        `scoring_func`, `n_shared_experts`, `shared_expert_intermediate_size`.

    Attributes:
      router: `[E, D] f32`.
      router_bias: `[E] f32`, or None.
      gate, up: `[E, I, D]`, as Hugging Face's `*_proj.weight`; FP8 planes `[E, bytes] u8`.
      down: `[E, D, I]`, likewise. `load_hf` reads all of them; `x @ w[e]` weights `[E, D, I]` have
        to be transposed.
      gate_bias, up_bias: `[E, I] f32`, or None; down_bias: `[E, D] f32`, or None.
      routed_bias: `[E] f32`, or None.
      shared_expert_gate: `[1, D]`, or None.
      shared_gate, shared_up, shared_down: `[I, D]`, `[I, D]`, `[D, I]` of all shared experts.

    Under `nnx.capture(..., nnx.Intermediate)` each call records `plan_telemetry`'s arrays, the
    `plan`, `topk_ids [tokens, K]` and `router_logits [tokens, E] f32`, which an auxiliary loss may
    be taken of; without it a call changes nothing and costs nothing more.

    Modules stacked by `nnx.vmap` run in `nnx.scan`, or by `layer=`, the index in the stack; see
    docs/using.md.

    Raises:
      ValueError, TypeError: sizes or options that do not fit, naming both values.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int | None = None,
        *,
        num_experts: int | None = None,
        top_k: int | None = None,
        activation: str | Activation = "silu",
        expert_biases: bool = False,
        score_function: str | None = None,
        num_groups: int | None = None,
        top_k_groups: int | None = None,
        router_bias: bool = False,
        routed_bias: bool = False,
        routed_scaling_factor: float = 1.0,
        norm_topk_prob: bool = True,
        num_shared_experts: int | None = None,
        shared_intermediate_size: int | None = None,
        shared_expert_gate: bool = False,
        shared_expert_sms: int | None = None,
        dtype=None,
        param_dtype=jnp.float32,
        weight_format: str | None = None,
        weight_dtype=None,
        mesh: jax.sharding.Mesh | None = None,
        axis: str = "ep",
        balance: str = "haloq",
        method: str | None = None,
        layer: int | None = None,
        reference_scheme: str | None = None,
        rngs: nnx.Rngs,
        **aliases,
    ):
        sizes = {
            "intermediate_size": intermediate_size,
            "num_experts": num_experts,
            "top_k": top_k,
            "score_function": score_function,
            "num_groups": num_groups,
            "top_k_groups": top_k_groups,
            "num_shared_experts": num_shared_experts,
            "shared_intermediate_size": shared_intermediate_size,
        }
        (
            intermediate_size,
            num_experts,
            top_k,
            score_function,
            num_groups,
            top_k_groups,
            num_shared_experts,
            shared_intermediate_size,
        ) = names.resolve(sizes, aliases).values()
        score_function = "softmax" if score_function is None else score_function
        num_shared_experts = 0 if num_shared_experts is None else num_shared_experts
        check_router_arguments(
            num_experts, top_k, score_function, num_groups, top_k_groups, norm_topk_prob
        )
        for name, size in (
            ("hidden_size", hidden_size),
            ("intermediate_size", intermediate_size),
        ):
            check_integer(name, size, least=1)
        shared = _shared_size(
            num_shared_experts,
            shared_intermediate_size,
            intermediate_size,
            shared_expert_sms,
            shared_expert_gate,
        )
        for name, flag in (
            ("routed_bias", routed_bias),
            ("router_bias", router_bias),
            ("expert_biases", expert_biases),
        ):
            check_flag(name, flag)
        _check_scale(routed_scaling_factor)
        check_balance(balance)
        if layer is not None:
            layer = check_integer("layer", layer, least=0)
        is_ambient = mesh is None
        mesh = meshes.ambient_mesh() if is_ambient else mesh
        method = _method_of_scheme(method, reference_scheme)
        self.method = _check_method(method, mesh, axis, num_experts, is_ambient)
        _check_float("dtype", dtype)
        _check_float("param_dtype", param_dtype)
        self.weight_format = _check_format(weight_format, weight_dtype, dtype)
        expert_format = format_of(self.weight_format, "float32")
        expert_format.check_sizes(
            hidden_size, intermediate_size, "hidden_size", "intermediate_size"
        )
        if self.method == "dense" and not expert_format.has_gradient:
            raise ValueError(
                f'method="dense" takes no weights of {expert_format.name}; use "portable"'
            )
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_experts, self.top_k = num_experts, top_k
        self.score_function, self.norm_topk_prob = score_function, norm_topk_prob
        self.num_groups, self.top_k_groups = num_groups, top_k_groups
        self.routed_scaling_factor = routed_scaling_factor
        self.dtype, self.mesh, self.axis = dtype, mesh, axis
        self.activation, self.expert_biases = Activation.of(activation), expert_biases
        self.balance = balance
        self.layer, self.attached_as = layer, None
        planes = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=0)
        matrix = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        d, i, e = hidden_size, intermediate_size, num_experts

        def make(kind, value, sharding=(None,)):
            if mesh is None:
                return kind(value)
            own = {"mesh": mesh} if isinstance(mesh, jax.sharding.Mesh) else {}
            return kind(value, out_sharding=sharding, **own)

        def expert_plane(shape):
            plane = expert_format.pack(planes(rngs.params(), shape, param_dtype))
            kind = ExpertPlane if expert_format.has_gradient else Fp8Plane
            return make(kind, plane, (axis, *[None] * (plane.ndim - 1)))

        def expert_bias(size):
            zeros = jnp.zeros((e, size), jnp.float32) if expert_biases else None
            return nnx.data(zeros if zeros is None else make(ExpertBias, zeros, (axis, None)))

        def replicated(shape, kind_dtype=param_dtype):
            return make(nnx.Param, matrix(rngs.params(), shape, kind_dtype))

        self.router = replicated((e, d), jnp.float32)
        bias = make(RoutedBias, jnp.zeros(e, jnp.float32)) if routed_bias else None
        self.routed_bias = nnx.data(bias)
        bias = make(nnx.Param, jnp.zeros(e, jnp.float32)) if router_bias else None
        self.router_bias = nnx.data(bias)
        self.gate, self.up = expert_plane((e, i, d)), expert_plane((e, i, d))
        self.down = expert_plane((e, d, i))
        self.gate_bias, self.up_bias = expert_bias(i), expert_bias(i)
        self.down_bias = expert_bias(d)
        self.has_shared, self.shared_expert_sms = shared > 0, shared_expert_sms
        if self.has_shared:
            self.shared_gate = replicated((shared, d))
            self.shared_up = replicated((shared, d))
            self.shared_down = replicated((d, shared))
        self.shared_expert_gate = nnx.data(replicated((1, d)) if shared_expert_gate else None)
        self.domain, self.domain_layer = nnx.data(None), nnx.data(None)

    @property
    def weight_dtype(self) -> str | None:
        """The alias of `weight_format`; None for elements."""
        return format_of(self.weight_format, "float32").weight_dtype

    def layout(self, dtype="float32") -> BundleLayout:
        """The planes of one expert, computed with in `dtype` where `weight_format` is None."""
        expert_format = format_of(self.weight_format, dtype)
        sizes = (self.hidden_size, self.intermediate_size)
        return bundle_layout(expert_format, *sizes, self.expert_biases)

    def expert_variables(self) -> dict[str, nnx.Variable]:
        """The variables that hold the planes of all experts, by the planes' names."""
        found = {name: getattr(self, name) for name in PLANES}
        return {name: variable for name, variable in found.items() if variable is not None}

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
          x: `[..., D]`; with a mesh its tokens are spread over `axis` in order, and must be
            divisible by the ranks. Rows that pad them are routed like any other and change none:
            drop their outputs.
          domain: a `DomainHandle`; default: the one `attach` put here.
          layer: overrides the module's layer number; may be traced (a scan over layers). Of a
            stacked module, the index in the stack.
          weights_version: i32, with a Domain that is `resident`: another one whenever the weights
            of this layer have changed, or are another model's.
          forced_routing: `"balanced"` ignores the router (`balanced_routing`): for timing only.

        Returns:
          `x`'s shape and dtype, and on an Explicit mesh its sharding.

        Raises:
          ValueError, TypeError: an input that does not fit, `method="fused"` without a Domain, or
            with one of other devices or of another dtype.
        """
        if x.shape[-1:] != (self.hidden_size,):
            raise ValueError(f"x has shape {x.shape}, expected [..., {self.hidden_size}]")
        if forced_routing is not None and forced_routing not in FORCED_ROUTINGS:
            raise ValueError(f"forced_routing={forced_routing!r} is not one of {FORCED_ROUTINGS}")
        if domain is None and self.domain is not None:
            domain = fits.unstacked(self.domain.get_value())
        if domain is None and find_method(self.method).needs_domain:
            raise ValueError(
                f'method="{self.method}" needs a Domain: pass domain=domain.handle, or call '
                'jax_iser.nnx.attach(model, domain), or use method="portable"'
            )
        given = jax.dtypes.canonicalize_dtype(x.dtype)  # NumPy's f64 is f32 in jax
        dtype = given if self.dtype is None else jnp.dtype(self.dtype)
        self._check_call(x, dtype, domain, weights_version)
        if self.weight_format is not None:
            format_of(self.weight_format, dtype.name).check_dtype(dtype.name)
        in_stack, layer = self._layer_of_call(layer)
        version = as_i32("weights_version", 0 if weights_version is None else weights_version)
        y, plan, topk_ids, logits = _run(
            _Settings.of(self, forced_routing, with_logits=hasattr(self, "__captures__")),
            jnp.asarray(x, dtype),
            *self._weights(dtype, in_stack),
            domain,
            layer,
            version,
        )
        self._sow(plan, topk_ids, logits, dtype)
        return y.astype(given)

    def _check_call(self, x, dtype, domain, weights_version):
        if domain is not None:
            check_handle(domain)
            fits.check_alive(domain)
            fits.check_devices(self, domain, "this MoE")
            if find_method(self.method).needs_domain:
                fits.check_dtype(self, dtype, domain.config, "this MoE")
                if domain.config.resident and weights_version is None:
                    raise ValueError(
                        "the Domain keeps replicas from call to call (resident=True), and cannot "
                        "see that weights have changed: pass weights_version=, or make the Domain "
                        "with resident=False"
                    )
        fits.check_variables(self)
        if self.mesh is not None:
            meshes.check_context(self.mesh, "this MoE")
            each = 1 if domain is None else domain.config.ranks_per_device
            fits.check_divisible(x.shape, self.mesh.shape[self.axis], each, self.axis)

    def _first_layer(self) -> int:
        """The module's number in the Domain; of a stacked one, that of its first layer."""
        return self.layer if self.layer is not None else self.attached_as or 0

    def _layer_of_call(self, layer):
        """The index in the stack, None without one, and the number in the Domain: i32 scalars."""
        first, num_stacked = self._first_layer(), fits.stack_size(self)
        if layer is not None:
            layer = as_i32("layer", layer)
            return (None, layer) if num_stacked is None else (layer, layer + first)
        if self.domain_layer is not None and self.domain_layer.get_value().ndim == 0:
            layer = self.domain_layer.get_value()  # in a scan over the stack
            return (None if num_stacked is None else layer - first), layer
        if num_stacked is not None:
            raise ValueError(
                f"this MoE is stacked over {num_stacked} layers: call it in nnx.scan over them, or "
                "pass layer=, the index in the stack"
            )
        return None, jnp.int32(first)

    def _weights(self, dtype, in_stack):
        """Replicated weights, and the expert planes, as the computation takes them."""

        def of_layer(variable, num_dims):
            value = variable[...]
            return value if value.ndim == num_dims else value[in_stack]

        def optional(variable, num_dims):
            return None if variable is None else of_layer(variable, num_dims)

        shared = None
        if self.has_shared:
            matrices = (self.shared_gate, self.shared_up, self.shared_down)
            shared = tuple(of_layer(p, 2).astype(dtype) for p in matrices)
        planes = {name: variable[...] for name, variable in self.expert_variables().items()}
        if in_stack is not None and self._first_layer() > 0:
            # A call has one layer operand, for the stack and for the Domain: here they differ.
            planes = {name: plane[in_stack] for name, plane in planes.items()}
        layout = {plane.name: plane for plane in self.layout(dtype.name).planes}
        experts = {name: p.astype(layout[name].array_dtype) for name, p in planes.items()}
        replicated = _Replicated(
            of_layer(self.router, 2),
            optional(self.router_bias, 1),
            optional(self.routed_bias, 1),
            shared,
            optional(self.shared_expert_gate, 2),
            jnp.float32(1) * self.routed_scaling_factor,
        )
        return replicated, ExpertWeights(**experts)

    def _sow(self, plan, topk_ids, logits, dtype):
        """Records telemetry for `nnx.capture`; outside of it a module must not change."""
        if not hasattr(self, "__captures__"):
            return
        values = plan_telemetry(plan, self.layout(dtype.name).num_bytes)
        values |= {"plan": plan, "topk_ids": topk_ids}
        if logits is not None:
            values["router_logits"] = logits
        for name, value in values.items():
            self.sow(nnx.Intermediate, name, value)


class _Replicated(NamedTuple):
    """Weights that all devices have alike."""

    router: jax.Array
    router_bias: jax.Array | None
    routed_bias: jax.Array | None
    shared: tuple[jax.Array, ...] | None
    shared_expert_gate: jax.Array | None
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class _Settings:
    """All that a call depends on beside its arrays; modules of equal settings share a program."""

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None
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
    weight_format: str | None
    activation: Activation
    forced_routing: str | None
    with_logits: bool

    @classmethod
    def of(cls, module: MoE, forced_routing: str | None, with_logits: bool) -> _Settings:
        fields = {field.name for field in dataclasses.fields(cls)}
        of_module = fields - {"forced_routing", "with_logits"}
        values = {name: getattr(module, name) for name in of_module}
        return cls(**values, forced_routing=forced_routing, with_logits=with_logits)


# Jitted, or calls and gradients outside jit would run op by op.
@functools.partial(jax.jit, static_argnums=0)
def _run(settings: _Settings, x, replicated, experts, domain, layer, version):
    """The layer on the tokens and experts of all devices: `(y, Plan, topk_ids, logits)`."""
    on_device = functools.partial(_on_device, settings)
    operands = (replicated, experts, domain, layer, version)
    if settings.mesh is None:
        y, *rest = on_device(x.reshape(-1, x.shape[-1]), *operands)
        return y.reshape(x.shape), *rest
    sharded = P(settings.axis)
    plane = format_of(settings.weight_format, x.dtype.name).plane("gate", 1, x.shape[-1])
    is_stacked = experts.gate.ndim > plane.num_dims
    of_experts = P(None, settings.axis) if is_stacked else sharded
    rest_specs = (Plan.specs(settings.axis), sharded, sharded if settings.with_logits else None)

    def on_all(mesh, x, *operands):
        y, *rest = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(sharded, P(), of_experts, sharded, P(), P()),
            out_specs=(sharded, *rest_specs),
            axis_names={settings.axis},
            check_vma=False,
        )(x.reshape(-1, x.shape[-1]), *operands)
        return y.reshape(x.shape), *rest

    y_spec = meshes.spec_like(x, settings.mesh, settings.axis)
    return meshes.on_mesh(on_all, settings.mesh, (y_spec, *rest_specs))(x, *operands)


def _on_device(settings: _Settings, tokens, replicated, experts, domain, layer, version):
    """The layer on the tokens and experts of one device."""
    options = {
        "layer": layer,
        "balance": settings.balance,
        "axis_name": None if settings.mesh is None else settings.axis,
    }
    if replicated.shared is not None:
        options["shared_expert"] = functools.partial(_shared_expert, settings, replicated)
    ids, weights, logits = _route(settings, tokens, replicated)
    options["weight_format"] = format_of(settings.weight_format, tokens.dtype.name).name
    options["activation"] = settings.activation
    options |= {"method": settings.method, "weights_version": version}
    y, plan = moe_layer(tokens, ids, weights, experts, domain, **options)
    return y, plan, ids, logits if settings.with_logits else None


def _shared_expert(settings: _Settings, replicated: _Replicated, tokens):
    """The shared experts' output; their gate is computed in f32."""
    assert replicated.shared is not None  # or it is not called
    y = shared_expert(
        tokens,
        *replicated.shared,
        sms=settings.shared_expert_sms,
        activation=settings.activation,
    )
    if replicated.shared_expert_gate is None:
        return y
    gate = jax.nn.sigmoid(router_logits(tokens, replicated.shared_expert_gate))
    return (gate * y.astype(jnp.float32)).astype(y.dtype)


def _route(settings: _Settings, tokens, replicated: _Replicated):
    """`topk_ids`, `topk_weights` and `router_logits` of one device's tokens."""
    if settings.forced_routing is None or settings.with_logits:
        logits = router_logits(tokens, replicated.router, replicated.router_bias)
    if settings.forced_routing is None:
        ids, weights = route(
            logits,
            top_k=settings.top_k,
            score_function=settings.score_function,
            num_groups=settings.num_groups,
            top_k_groups=settings.top_k_groups,
            routed_bias=replicated.routed_bias,
            routed_scaling_factor=replicated.scale,
            norm_topk_prob=settings.norm_topk_prob,
        )
        return ids, weights, logits
    device = 0 if settings.mesh is None else jax.lax.axis_index(settings.axis)
    ids, weights = balanced_routing(
        tokens.shape[0],
        device * tokens.shape[0],
        settings.top_k,
        settings.num_experts,
        replicated.scale,
    )
    return ids, weights, logits if settings.with_logits else None


def _check_method(method, mesh, axis, num_experts, is_ambient):
    if method is None:
        method = "portable" if mesh is None else "fused"
    method = method_name(method)
    if mesh is None:
        if find_method(method).needs_domain:
            raise ValueError(
                f'method="{method}" needs a mesh: pass mesh=, or make the MoE under jax.set_mesh, '
                'or use method="portable"'
            )
        return method
    if not find_method(method).spans_ranks:
        raise ValueError(f'method="{method}" runs without a mesh only; use "portable" on a mesh')
    meshes.check_mesh(mesh, axis, is_ambient)
    if num_experts % mesh.shape[axis]:
        raise ValueError(
            f"num_experts={num_experts} is not divisible by the {mesh.shape[axis]} devices of "
            f'axis "{axis}"; pad the experts or use an axis size that divides {num_experts}'
        )
    return method


def _shared_size(num_shared, shared_intermediate, intermediate, sms, has_gate):
    """`I` of all shared experts, 0 without any."""
    check_flag("shared_expert_gate", has_gate)
    check_integer("num_shared_experts", num_shared, least=0)
    check_sms("shared_expert_sms", sms)
    if shared_intermediate is not None:
        check_integer("shared_intermediate_size", shared_intermediate, least=1)
    if num_shared == 0:
        for name, value in (
            ("shared_intermediate_size", shared_intermediate),
            ("shared_expert_sms", sms),
            ("shared_expert_gate", has_gate or None),
        ):
            if value is not None:
                raise ValueError(
                    f"{name}={value} is given, but num_shared_experts=0: there is no shared "
                    "expert; pass num_shared_experts=1 or more, or leave it out"
                )
    return num_shared * (shared_intermediate or intermediate)


def _check_scale(factor):
    is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
    if not is_number and getattr(factor, "shape", None) != ():
        raise TypeError(f"routed_scaling_factor={factor!r} is not a number or a scalar array")


def _check_float(name, dtype):
    try:
        is_float = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        is_float = False
    if not is_float:
        raise TypeError(f"{name}={dtype!r} is not a floating-point dtype")


def _method_of_scheme(method, scheme):
    """The method that `reference_scheme` used to choose beside `method`."""
    if scheme is None:
        return method
    if scheme not in SCHEMES:
        raise ValueError(f"reference_scheme={scheme!r} is not one of {SCHEMES}")
    remedy = 'use method="dense"' if scheme == "dense" else "leave it out"
    warnings.warn(f"reference_scheme is deprecated: {remedy}", DeprecationWarning, stacklevel=3)
    return "dense" if scheme == "dense" else method


def _check_format(weight_format, weight_dtype, dtype) -> str | None:
    """The format's name, None for elements of the computation's dtype."""
    weight_dtype = dtype_name(weight_dtype)
    if weight_format is None and weight_dtype is None:
        return None
    if weight_format is not None and weight_format not in FORMATS:
        raise ValueError(f"weight_format={weight_format!r} is not one of {', '.join(FORMATS)}")
    found = format_of(weight_format, "float32", weight_dtype)
    if dtype is not None:
        found.check_dtype(jnp.dtype(dtype).name)
    return found.name
