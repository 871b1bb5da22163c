"""`route` against a router written one token at a time after DeepSeek-V3's inference code."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_iser.router import SCORE_FUNCTIONS, check_router_arguments, route, router_logits

NUM_EXPERTS = 16


def route_one_token(
    logits, top_k, score_function, num_groups, top_k_groups, bias, scaling, normalise
) -> tuple[list[int], list[np.float32]]:
    """Sorts, masks and picks in plain Python; f32 as the router."""
    logits = logits.astype(np.float32)
    if score_function == "softmax_topk":
        scores = logits
    elif score_function == "softmax":
        exponent = np.exp(logits - logits.max())
        scores = exponent / exponent.sum(dtype=np.float32)
    else:
        scores = 1 / (1 + np.exp(-logits))
    choice = scores if bias is None else scores + bias.astype(np.float32)
    eligible = range(len(logits))
    if num_groups:
        size = len(logits) // num_groups
        groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
        taken = 1 if bias is None else 2
        strength = [sum(sorted(choice[list(g)])[-taken:]) for g in groups]
        best = sorted(range(num_groups), key=lambda g: (-strength[g], g))[:top_k_groups]
        eligible = [e for g in sorted(best) for e in groups[g]]
    ids = sorted(eligible, key=lambda e: (-choice[e], e))[:top_k]
    weights = scores[ids]
    if score_function == "softmax_topk":
        weights = np.exp(weights - weights.max())
    if normalise:
        weights = weights / weights.sum()
    return ids, weights * np.float32(scaling)


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
@pytest.mark.parametrize("groups", [(None, None), (4, 2), (16, 5), (1, 1)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_matches_a_router_of_one_token(score_function, groups, has_bias, normalise):
    if score_function == "softmax_topk" and not normalise:
        pytest.skip("a softmax over the chosen logits sums to 1")
    rng = np.random.default_rng(3)
    # Multiples of 1/4 make many exact ties, which go to the lower id.
    logits = np.round(rng.normal(size=(64, NUM_EXPERTS)) * 8) / 4
    bias = np.round(rng.normal(size=NUM_EXPERTS) * 4) / 8 if has_bias else None
    topk_ids, topk_weights = route(
        jnp.asarray(logits, jnp.float32),
        top_k=4,
        score_function=score_function,
        num_groups=groups[0],
        top_k_groups=groups[1],
        routed_bias=None if bias is None else jnp.asarray(bias, jnp.float32),
        routed_scaling_factor=2.5,
        norm_topk_prob=normalise,
    )
    assert topk_ids.dtype == jnp.int32
    assert topk_weights.dtype == jnp.float32
    for token in range(len(logits)):
        ids, weights = route_one_token(
            logits[token], 4, score_function, *groups, bias, 2.5, normalise
        )
        assert topk_ids[token].tolist() == ids, f"token {token}"
        # exp and the sums differ between NumPy and XLA in the last bits.
        np.testing.assert_allclose(topk_weights[token], weights, rtol=1e-5)


@given(
    num_experts=st.sampled_from([1, 3, 8, 64]),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
)
def test_ids_are_distinct_and_valid_at_any_scale(num_experts, seed, scale):
    top_k = min(3, num_experts)
    logits = np.random.default_rng(seed).normal(size=(5, num_experts)) * scale
    topk_ids, topk_weights = route(jnp.asarray(logits, jnp.float32), top_k=top_k)
    assert all(len(set(row)) == top_k for row in topk_ids.tolist())
    assert ((topk_ids >= 0) & (topk_ids < num_experts)).all()
    np.testing.assert_allclose(topk_weights.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [(None, None), (4, 2)])
def test_a_nan_logit_shows_in_its_token_only(score_function, groups):
    logits = np.random.default_rng(0).normal(size=(6, NUM_EXPERTS)).astype(np.float32)
    options = {
        "top_k": 4,
        "score_function": score_function,
        "num_groups": groups[0],
        "top_k_groups": groups[1],
    }
    clean_ids, clean_weights = route(jnp.asarray(logits), **options)
    logits[2, 5] = np.nan
    topk_ids, topk_weights = route(jnp.asarray(logits), **options)
    assert topk_ids[2].tolist() == [0, 1, 2, 3]
    assert np.isnan(topk_weights[2]).all()
    others = np.arange(6) != 2
    assert (topk_ids[others] == clean_ids[others]).all()
    assert (topk_weights[others] == clean_weights[others]).all()


def test_infinite_logits():
    logits = jnp.zeros((1, 4)).at[0, 2].set(jnp.inf)
    ids, weights = route(logits, top_k=1, score_function="sigmoid")
    assert (ids.item(), weights.item()) == (2, 1.0)
    ids, weights = route(logits, top_k=1, score_function="softmax")
    assert ids.item() == 0
    assert np.isnan(weights.item())


def test_the_bias_moves_the_choice_and_not_the_weights():
    logits = jnp.asarray([[2.0, 1.0, 0.0, -1.0]])
    bias = jnp.asarray([-9.0, 0.0, 0.0, 0.0])
    options = {"top_k": 2, "score_function": "sigmoid", "norm_topk_prob": False}
    ids, weights = route(logits, routed_bias=bias, **options)
    assert ids.tolist() == [[1, 2]]
    np.testing.assert_array_equal(weights, jax.nn.sigmoid(logits[:, 1:3]))
    gradient = jax.grad(lambda b: route(logits, routed_bias=b, **options)[1].sum())(bias)
    assert (gradient == 0).all()


def test_router_logits_are_exact_to_f32():
    rng = np.random.default_rng(1)
    x, weight = rng.normal(size=(2, 5, 64)), rng.normal(size=(7, 64))
    logits = router_logits(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32))
    # 64 products of normal values: f32 rounding stays far below 1e-5.
    np.testing.assert_allclose(logits, x @ weight.T, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 17}, ["top_k=17", "num_experts=16"]),
        ({"top_k": 0}, ["top_k=0", "num_experts=16"]),
        ({"top_k": 2, "num_groups": 5, "top_k_groups": 1}, ["num_experts=16", "num_groups=5"]),
        ({"top_k": 2, "num_groups": 4}, ["num_groups=4", "top_k_groups=None"]),
        ({"top_k": 2, "num_groups": 4, "top_k_groups": 5}, ["top_k_groups=5", "num_groups=4"]),
        ({"top_k": 5, "num_groups": 4, "top_k_groups": 1}, ["top_k=5", "4 experts"]),
        ({"top_k": 2, "score_function": "tanh"}, ["'tanh'", "softmax", "sigmoid"]),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(options, words):
    pattern = ".*".join(map(re.escape, words))
    with pytest.raises(ValueError, match=pattern):
        check_router_arguments(NUM_EXPERTS, **options)
    with pytest.raises(ValueError, match=pattern):
        route(jnp.zeros((1, NUM_EXPERTS)), **options)


def test_a_bias_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"\(3,\), expected \(4,\)"):
        route(jnp.zeros((1, 4)), top_k=1, routed_bias=jnp.zeros(3))


def test_softmax_of_the_chosen_has_the_weights_of_softmax_normalised():
    logits = jax.random.normal(jax.random.key(0), (200, NUM_EXPERTS)) * 4
    ids, weights = route(logits, top_k=4, score_function="softmax_topk")
    others, expected = route(logits, top_k=4, score_function="softmax")
    np.testing.assert_array_equal(ids, others)
    np.testing.assert_allclose(weights, expected, rtol=3e-6)  # exp and sums of other numbers


def test_softmax_of_the_chosen_tells_apart_what_probabilities_do_not():
    """Neighbouring logits far below the largest: their probabilities are 0, or one number."""
    for best, low in ((200.0, 1.0), (8.0, 0.125)):
        logits = jnp.full(NUM_EXPERTS, -300.0).at[3].set(best)
        logits = logits.at[5].set(low).at[9].set(np.nextafter(np.float32(low), np.float32(2)))
        ids, weights = route(logits, top_k=2, score_function="softmax_topk")
        assert ids.tolist() == [3, 9]
        assert jnp.isclose(weights.sum(), 1)
        assert route(logits, top_k=2, score_function="softmax")[0].tolist()[0] == 3
    logits = jnp.zeros(NUM_EXPERTS).at[jnp.array([2, 7])].set(1.0)
    ids, weights = route(logits, top_k=3, score_function="softmax_topk")  # ties to the lower id
    assert ids.tolist() == [2, 7, 0]


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_softmax_of_the_chosen_with_a_bad_logit(value):
    logits = jnp.zeros((2, NUM_EXPERTS)).at[0, 5].set(value)
    ids, weights = route(logits, top_k=3, score_function="softmax_topk")
    assert ids[0].tolist() == [0, 1, 2]
    assert jnp.isnan(weights[0]).all()
    np.testing.assert_allclose(weights[1], 1 / 3, rtol=1e-6)


def test_softmax_of_the_chosen_is_normalised_already():
    with pytest.raises(ValueError, match=r"softmax_topk.* with norm_topk_prob=False"):
        route(jnp.zeros(8), top_k=2, score_function="softmax_topk", norm_topk_prob=False)


def test_router_logits_with_a_bias():
    x, weight = jax.random.normal(jax.random.key(1), (3, 8)), jnp.ones((4, 8))
    bias = jnp.arange(4.0)
    np.testing.assert_array_equal(
        router_logits(x, weight, bias), router_logits(x, weight) + bias[None]
    )
