"""What a plan did, as small arrays; and the routing that is a yardstick for its time."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
