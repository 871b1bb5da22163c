"""Which experts a token goes to, and with what weights: scores, groups, bias, top-k."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_iser.domain.config import check_flag, check_integer

SCORE_FUNCTIONS = ("softmax", "sigmoid", "softmax_topk")


def router_logits(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight.T + bias` in f32 at full precision.

    Args:
      x: `[..., hidden]`, any float type.
      weight: `[num_experts, hidden]`, the orientation of Hugging Face's `mlp.gate.weight`.
      bias: `[num_experts]`, or None.

    Returns:
      `[..., num_experts]` f32. A router at reduced precision flips near ties between experts.
    """
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    logits = jnp.einsum("...d,ed->...e", x, weight, precision=lax.Precision.HIGHEST)
    return logits if bias is None else logits + bias.astype(jnp.float32)


def check_router_arguments(
    num_experts: int,
    top_k: int,
    score_function: str = "softmax",
    num_groups: int | None = None,
    top_k_groups: int | None = None,
    norm_topk_prob: bool = True,
) -> None:
    """Raises ValueError or TypeError, naming both values, for a router that cannot be built."""
    check_flag("norm_topk_prob", norm_topk_prob)
    check_integer("num_experts", num_experts)
    check_integer("top_k", top_k)
    for name, value in (("num_groups", num_groups), ("top_k_groups", top_k_groups)):
        if value is not None:
            check_integer(name, value)
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"score_function={score_function!r} is not one of {SCORE_FUNCTIONS}")
    if score_function == "softmax_topk" and not norm_topk_prob:
        raise ValueError(
            'score_function="softmax_topk" with norm_topk_prob=False: a softmax over the chosen '
            'logits sums to 1; leave norm_topk_prob out, or use score_function="softmax"'
        )
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"top_k={top_k} must be between 1 and num_experts={num_experts}: "
            "a token takes each expert at most once"
        )
    if (num_groups is None) != (top_k_groups is None):
        raise ValueError(
            f"num_groups={num_groups} and top_k_groups={top_k_groups} go together: give both "
            "for a group-limited router or neither"
        )
    if num_groups is None or top_k_groups is None:
        return
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_experts={num_experts} is not divisible by num_groups={num_groups}")
    if not 1 <= top_k_groups <= num_groups:
        raise ValueError(
            f"top_k_groups={top_k_groups} must be between 1 and num_groups={num_groups}"
        )
    reachable = top_k_groups * (num_experts // num_groups)
    if top_k > reachable:
        raise ValueError(
            f"top_k={top_k} exceeds the {reachable} experts in top_k_groups={top_k_groups} "
            f"groups of {num_experts // num_groups}; raise top_k_groups"
        )


def _limit_to_groups(choice, num_groups, top_k_groups, has_bias):
    """Masks with -inf every expert outside the token's best groups (ties: lower group)."""
    grouped = choice.reshape(*choice.shape[:-1], num_groups, choice.shape[-1] // num_groups)
    if has_bias:
        strength = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
    else:
        strength = grouped.max(-1)
    _, kept = lax.top_k(strength, top_k_groups)
    is_kept = (kept[..., None] == jnp.arange(num_groups)).any(-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(choice.shape)


def _scores(logits, score_function):
    if score_function == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    return jax.nn.sigmoid(logits)


def route(
    logits: jax.Array,
    *,
    top_k: int,
    score_function: str = "softmax",
    num_groups: int | None = None,
    top_k_groups: int | None = None,
    routed_bias: jax.Array | None = None,
    routed_scaling_factor: float = 1.0,
    norm_topk_prob: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Top-k routing as Mixtral, Qwen, gpt-oss and DeepSeek do it, group-limited as DeepSeek-V3.

    Experts are chosen by `score + routed_bias`; the weights come from the scores alone, so that
    the bias balances load without entering the output. With groups, only the `top_k_groups`
    strongest of `num_groups` runs of consecutive experts are eligible; a group's strength is
    the sum of its two best biased scores with a bias, its best score without one.

    Args:
      logits: `[..., num_experts]`, any float type; the arithmetic is in f32.
      top_k: experts a token.
      score_function: `"softmax"` over all experts, `"sigmoid"` of each, or `"softmax_topk"`:
        experts are chosen by their logits, and the softmax is over the chosen ones, as in gpt-oss.
        Its weights are those of `"softmax"` with `norm_topk_prob`; it tells apart logits whose
        probabilities round to one number.
      num_groups, top_k_groups: both or neither.
      routed_bias: `[num_experts]` f32 or None.
      routed_scaling_factor: multiplies the weights, last.
      norm_topk_prob: whether the chosen scores are divided by their sum.

    Returns:
      `(topk_ids [..., top_k] i32, topk_weights [..., top_k] f32)`, best first, ties to the lower
      id. A token with a NaN score (a NaN logit; for both softmaxes `+inf` too) is routed as if
      all its scores were 0 and has NaN weights: its ids stay valid, and the NaN shows in that
      token's output only.

    Raises:
      ValueError: sizes that do not fit, naming both values.

    Source: DeepSeek-V3 technical report, section 2.1.2; auxiliary-loss-free balancing.
    """
    num_experts = logits.shape[-1]
    check_router_arguments(
        num_experts, top_k, score_function, num_groups, top_k_groups, norm_topk_prob
    )
    logits = logits.astype(jnp.float32)
    of_chosen = score_function == "softmax_topk"
    scores = logits if of_chosen else _scores(logits, score_function)
    # Zeros of either sign tie; top_k would put 0.0 before -0.0.
    choice = lax.stop_gradient(jnp.where(scores == 0, 0.0, scores))
    if routed_bias is not None:
        if routed_bias.shape != (num_experts,):
            raise ValueError(
                f"routed_bias has shape {routed_bias.shape}, expected ({num_experts},): one value "
                "an expert"
            )
        choice = choice + lax.stop_gradient(routed_bias).astype(jnp.float32)
    is_bad = jnp.isnan(choice).any(-1, keepdims=True)
    if of_chosen:
        is_bad |= jnp.isposinf(choice).any(-1, keepdims=True)
    choice = jnp.where(is_bad, 0.0, choice)
    if num_groups is not None and num_groups > 1:
        choice = _limit_to_groups(choice, num_groups, top_k_groups, routed_bias is not None)
    _, topk_ids = lax.top_k(choice, top_k)
    weights = jnp.take_along_axis(scores, topk_ids, axis=-1)
    if of_chosen:
        weights = jax.nn.softmax(weights, axis=-1)
    elif norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    weights = jnp.where(is_bad, jnp.nan, weights * routed_scaling_factor)
    return topk_ids.astype(jnp.int32), weights
