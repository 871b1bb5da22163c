"""Arguments of `nnx.MoE` that its families need: names, formats, activations, biases, gates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers import AXIS, assert_same_bits, mesh_of

import jax_iser
from jax_iser import Activation
from jax_iser.nnx import EXPERT_PLANES, ExpertBias, MoE, attach
from jax_iser.nnx.names import ALIASES

D, INNER, EXPERTS = 16, 24, 8
PLAIN = {"num_experts": EXPERTS, "top_k": 2}


def make_moe(*sizes, **options):
    return MoE(*(sizes or (D, INNER)), **PLAIN | options, rngs=nnx.Rngs(0))


def test_names_of_configs_make_the_same_module():
    own = {"num_groups": 4, "top_k_groups": 2, "score_function": "sigmoid"}
    moe = MoE(
        D, INNER, **PLAIN, **own, num_shared_experts=1, shared_intermediate_size=8, rngs=nnx.Rngs(0)
    )
    twin = MoE(
        D,
        moe_intermediate_size=INNER,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        scoring_func="sigmoid",
        n_shared_experts=1,
        shared_expert_intermediate_size=8,
        rngs=nnx.Rngs(0),
    )
    for name in (*PLAIN, *own, "intermediate_size", "hidden_size"):
        assert getattr(moe, name) == getattr(twin, name), name
    x = jax.random.normal(jax.random.key(0), (6, D))
    assert_same_bits(moe(x), twin(x))


@pytest.mark.parametrize("alias", ALIASES)
def test_two_names_of_one_argument(alias):
    own = {
        "intermediate_size": INNER,
        "num_experts": EXPERTS,
        "top_k": 2,
        "num_groups": 4,
        "top_k_groups": 2,
        "score_function": "softmax",
        "num_shared_experts": 2,
        "shared_intermediate_size": 8,
    }
    name = ALIASES[alias]
    MoE(D, **own, **{alias: own[name]}, rngs=nnx.Rngs(0))  # both alike
    other = "sigmoid" if alias == "scoring_func" else 2 * own[name]
    words = f"{name}={own[name]!r} and {alias}={other!r} are names of one argument"
    with pytest.raises(ValueError, match=words):
        MoE(D, **own, **{alias: other}, rngs=nnx.Rngs(0))


def test_two_aliases_of_one_argument():
    words = "num_local_experts=8 and n_routed_experts=4 are names of one argument"
    with pytest.raises(ValueError, match=words):
        MoE(D, INNER, num_local_experts=8, n_routed_experts=4, top_k=2, rngs=nnx.Rngs(0))


def test_names_that_mean_nothing_and_arguments_that_are_missing():
    with pytest.raises(TypeError, match=r"no argument 'num_expert'.* num_local_experts"):
        make_moe(num_expert=8)
    with pytest.raises(TypeError, match=r"MoE needs top_k= \(or num_experts_per_tok\)"):
        MoE(D, INNER, num_experts=EXPERTS, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"needs intermediate_size= \(or moe_intermediate_size\)"):
        MoE(D, **PLAIN, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activation": "relu"}, "activation='relu' is not one of silu, gelu_tanh, clamped"),
        ({"expert_biases": 1}, "expert_biases=1"),
        ({"router_bias": "yes"}, "router_bias='yes'"),
        (
            {"shared_expert_gate": True},
            "shared_expert_gate=True is given, but num_shared_experts=0",
        ),
        ({"weight_format": "int5"}, "weight_format='int5' is not one of float32"),
        ({"weight_format": "bfloat16", "dtype": "float32"}, 'weight_format="bfloat16" with dtype'),
        ({"weight_format": "float32", "weight_dtype": "float8_e4m3fn"}, "contradict each other"),
        ({"weight_format": "float8_block128"}, "hidden_size=16 is not a multiple of 64"),
    ],
)
def test_options_that_do_not_fit(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make_moe(**options)


def test_weight_formats_and_their_alias():
    by_format = make_moe(128, 64, weight_format="float8_block128")
    by_alias = make_moe(128, 64, weight_dtype=jnp.float8_e4m3fn)
    assert by_format.weight_format == by_alias.weight_format == "float8_block128"
    assert by_format.weight_dtype == by_alias.weight_dtype == "float8_e4m3fn"
    assert_same_bits(by_format.gate[...], by_alias.gate[...])
    moe = make_moe(weight_format="bfloat16")
    assert moe(jnp.ones((2, D), jnp.bfloat16)).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match='weight_format="bfloat16" with dtype="float32"'):
        moe(jnp.ones((2, D)))


@pytest.mark.parametrize("activation", ["gelu_tanh", Activation("clamped_swiglu", limit=0.5)])
def test_the_activation_is_the_shared_experts_too(activation):
    """With routed experts of zeros the output is the shared expert's, times its gate."""
    moe = make_moe(activation=activation, num_shared_experts=1, shared_expert_gate=True)
    moe.down[...] = 0 * moe.down[...]
    x = jax.random.normal(jax.random.key(1), (5, D))
    gate, up, down = (getattr(moe, f"shared_{name}")[...] for name in ("gate", "up", "down"))
    h = Activation.of(activation)(x @ gate.T, x @ up.T)
    expected = jax.nn.sigmoid(x @ moe.shared_expert_gate[...].T) * (h @ down.T)
    np.testing.assert_allclose(moe(x), expected, atol=1e-5)


def with_biases(moe):
    keys = jax.random.split(jax.random.key(3), 4)
    for key, name in zip(keys, ("gate_bias", "up_bias", "down_bias", "router_bias"), strict=True):
        variable = getattr(moe, name)
        variable[...] = jax.random.normal(key, variable[...].shape)
    return moe


def test_biases_are_trained():
    moe = with_biases(make_moe(expert_biases=True, router_bias=True))
    assert isinstance(moe.gate_bias, ExpertBias)
    assert moe.gate_bias[...].shape == (EXPERTS, INNER)
    assert moe.down_bias[...].shape == (EXPERTS, D)
    x = jax.random.normal(jax.random.key(2), (12, D))
    gradients = nnx.grad(lambda moe: (moe(x) ** 2).sum())(moe)
    for name in ("gate_bias", "up_bias", "down_bias", "router_bias"):
        assert np.abs(gradients[name].get_value()).max() > 0, name


SIZES = {"hidden_size": D, "intermediate_size": INNER, "max_tokens_per_rank": 8}


def domain_of(mesh, **options):
    limits = {"timeout_s": 60.0, "startup_timeout_s": 60.0}
    return jax_iser.Domain(mesh, AXIS, **PLAIN | SIZES | limits | options)


def test_a_domain_of_other_experts_is_refused():
    mesh = mesh_of(4)
    plain, biased = (make_moe(mesh=mesh, expert_biases=biases) for biases in (False, True))
    gelu = make_moe(mesh=mesh, activation="gelu_tanh")
    with domain_of(mesh) as domain:
        with pytest.raises(ValueError, match="expert_biases=False, this MoE has True; make a Dom"):
            attach(biased, domain)
        with pytest.raises(ValueError, match=r"activation=Activation.*silu.* has .*gelu_tanh"):
            attach(gelu, domain)
        attach(plain, domain)


def test_stacked_blocks_with_biases_run_in_a_scan():
    mesh = mesh_of(4)

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        options = {"expert_biases": True, "router_bias": True, "mesh": mesh, "axis": AXIS}
        return MoE(D, INNER, **PLAIN, **options, rngs=rngs)

    with domain_of(mesh, num_layers=2, expert_biases=True) as domain:
        model = with_biases(make(nnx.Rngs(0)))
        attach(model, domain)
        axes = nnx.StateAxes({EXPERT_PLANES: None, ...: 0})

        @nnx.jit
        @nnx.scan(in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)
        def forward(moe, x):
            return x + moe(x)

        x = jax.random.normal(jax.random.key(4), (32, D))
        found = forward(model, x)
        expected = x
        for layer in range(2):
            expected = expected + nnx.jit(lambda m, x, i: m(x, layer=i))(model, expected, layer)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        model.down_bias[...] = 0 * model.down_bias[...]
        assert np.abs(forward(model, x) - found).max() > 0.1
