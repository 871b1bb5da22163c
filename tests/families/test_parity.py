"""`nnx.MoE` against transformers' own blocks of seven families, with checkpoints' own names.

The fixtures hold what transformers computed (make_fixtures.py); where torch and transformers are
installed, further tests compute it anew.
"""

import functools
import importlib.util
import json

import jax
import numpy as np
import pytest
from families.recipes import FAMILIES, PREFIX, load_fixture, options_of
from flax import nnx
from layers import AXIS, assert_same_bits, mesh_of

import jax_iser
from jax_iser.nnx import MoE, attach, load_hf

RANKS = 4
HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
# Ours rounds three times on the way: h, an expert's output, and y, each by half a unit in the last
# place, 2^-9; the sum over experts is in f32.
BF16_ERROR = 2**-7
# transformers in bf16 rounds ten times: also gate, up, their product, the router's weight, each
# weighted output and each of the sums over experts.
BF16_ERROR_OF_BOTH = 2**-6

fixture_of = functools.cache(load_fixture)


def make_moe(family, config, **options):
    options = options_of(family, config) | options
    return MoE(config["hidden_size"], **options, rngs=nnx.Rngs(0))


def loaded(family, fixture, **options):
    moe = make_moe(family, fixture["config"], **options)
    load_hf(moe, fixture["tensors"], PREFIX)
    return moe


def domain_of(mesh, moe, tokens, **options):
    return jax_iser.Domain(
        mesh,
        AXIS,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        hidden_size=moe.hidden_size,
        intermediate_size=moe.intermediate_size,
        max_tokens_per_rank=tokens // RANKS,
        activation=moe.activation,
        expert_biases=moe.expert_biases,
        num_helper_slots=2,
        min_group_size=1,
        timeout_s=60.0,
        startup_timeout_s=60.0,
        **options,
    )


@nnx.jit
def observed(moe, x):
    return nnx.capture(moe, nnx.Intermediate)(x)


def run(moe, x):
    """The output, the experts chosen, sorted, and the telemetry."""
    y, seen = observed(moe, x)
    seen = {name: values[0] for name, values in nnx.to_pure_dict(seen).items()}
    return np.asarray(y), np.sort(seen["topk_ids"], axis=-1), seen


def assert_close(found, expected, error, what):
    """Within `error` of the largest magnitude."""
    gap = np.abs(np.float32(found) - np.float32(expected)).max() / np.abs(expected).max()
    assert gap <= error, (
        f"{what}: off by {gap:.3g} of the largest |y|, at most {error:.3g} expected"
    )


def check_f32(family, fixture, moe):
    y, topk_ids, _ = run(moe, fixture["x"])
    np.testing.assert_array_equal(topk_ids, fixture["topk_ids_float32"])
    assert_close(y, fixture["y_float32"], 1e-5, family)
    return y


def check_bf16(family, fixture, moe):
    y, topk_ids, _ = run(moe, jax.numpy.asarray(fixture["x"], "bfloat16"))
    # The router is in f32 here; in most families transformers rounds its logits to bf16.
    same = (topk_ids == fixture["topk_ids_float32"]).all(-1)
    assert same.all(), f"{family}: tokens {np.flatnonzero(~same)} go to other experts"
    assert_close(y, fixture["y_float32"], BF16_ERROR, f"{family}, beside f32")
    same = (topk_ids == fixture["topk_ids_bfloat16"]).all(-1)
    assert same.mean() > 0.8, f"{family}: {same.mean():.0%} of the tokens go to the same experts"
    scale = np.abs(fixture["y_bfloat16"]).max()
    gap = np.abs(np.float32(y) - fixture["y_bfloat16"])[same].max() / scale
    assert gap <= BF16_ERROR_OF_BOTH, f"{family}, beside bf16: off by {gap:.3g} of the largest |y|"
    return y


CHECKS = {"float32": check_f32, "bfloat16": check_bf16}


@pytest.mark.parametrize("dtype", CHECKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_block_of_family(family, dtype):
    """One rank in plain JAX, and four ranks with replicas, which change no bit."""
    fixture = fixture_of(family)
    CHECKS[dtype](family, fixture, loaded(family, fixture, dtype=dtype))
    mesh, tokens = mesh_of(RANKS), len(fixture["x"])
    moe = loaded(family, fixture, dtype=dtype, mesh=mesh, axis=AXIS)
    with domain_of(mesh, moe, tokens, dtype=dtype) as domain:
        attach(moe, domain)
        y = CHECKS[dtype](family, fixture, moe)
        x = jax.numpy.asarray(fixture["x"], dtype)
        seen = run(moe, x)[2]
        assert seen["copies"] > 0
        assert seen["copied_bytes"] == seen["copies"] * domain.config.bundle_bytes
        moe.balance = "none"
        off, _, seen = run(moe, x)
        assert seen["copies"] == 0
        assert_same_bits(off, y, f"{family} without replicas")


def fused_tensors(family, tensors):
    """Separate experts put together as transformers 5 holds them."""
    first, names = f"{PREFIX}mlp.experts.", ("gate_proj", "up_proj", "down_proj")
    if family == "mixtral":
        first, names = f"{PREFIX}block_sparse_moe.experts.", ("w1", "w3", "w2")
    found = {name: value for name, value in tensors.items() if not name.startswith(first)}
    count = 1 + max(int(n[len(first) :].split(".")[0]) for n in tensors if n.startswith(first))
    stack = lambda name: np.stack([tensors[f"{first}{e}.{name}.weight"] for e in range(count)])  # noqa: E731
    gate, up, down = map(stack, names)
    found[f"{first}gate_up_proj"] = np.concatenate([gate, up], axis=1)
    return found | {f"{first}down_proj": down}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt_oss"])
def test_fused_tensors_load_the_same_block(family):
    fixture = fixture_of(family)
    moe, expected = make_moe(family, fixture["config"]), loaded(family, fixture)
    load_hf(moe, fused_tensors(family, fixture["tensors"]), PREFIX)
    for name, variable in expected.expert_variables().items():
        assert_same_bits(getattr(moe, name).get_value(), variable.get_value(), f"{family} {name}")


def test_biases_and_the_limit_of_gpt_oss_matter():
    """Each part that is left out shows, far beyond the error."""
    fixture = fixture_of("gpt_oss")
    scale = np.abs(fixture["y_float32"]).max()
    for name in ("gate_bias", "up_bias", "down_bias", "router_bias", "activation"):
        moe = loaded("gpt_oss", fixture)
        if name == "activation":
            moe.activation = jax_iser.Activation("clamped_swiglu", limit=1e6)
        else:
            variable = getattr(moe, name)
            variable.set_value(0 * variable.get_value())
        gap = np.abs(run(moe, fixture["x"])[0] - fixture["y_float32"]).max() / scale
        assert gap > 0.01, f"without {name}: off by {gap:.3g}"


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch and transformers")
@pytest.mark.parametrize("family", FAMILIES)
def test_fixtures_are_what_transformers_computes(family):
    make_fixtures = pytest.importorskip("families.make_fixtures")
    made, fixture = make_fixtures.make(family), fixture_of(family)
    assert json.loads(str(made.pop("config"))) == fixture["config"]
    tensors = {n.removeprefix("tensor:"): v for n, v in made.items() if n.startswith("tensor:")}
    assert tensors.keys() == fixture["tensors"].keys()
    for name, value in tensors.items():
        assert_same_bits(value, fixture["tensors"][name], name)
    assert_same_bits(made["x"], fixture["x"])
    np.testing.assert_array_equal(made["topk_ids_float32"], fixture["topk_ids_float32"])
    # Other CPUs sum products in another order.
    assert_close(made["y_float32"], fixture["y_float32"], 1e-6, family)


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch and transformers")
@pytest.mark.parametrize("family", FAMILIES)
def test_larger_blocks(family):
    make_fixtures = pytest.importorskip("families.make_fixtures")
    sizes = {"hidden_size": 192, "intermediate_size": 96, "num_experts_per_tok": 4}
    made = make_fixtures.make(family, sizes, tokens=200, seed=5)
    tensors = {n.removeprefix("tensor:"): v for n, v in made.items() if n.startswith("tensor:")}
    fixture = made | {"tensors": tensors, "config": json.loads(str(made["config"]))}
    check_f32(family, fixture, loaded(family, fixture))
