"""Field names of Hugging Face's configs, which `MoE` takes beside its own."""

from __future__ import annotations

from typing import Any

ALIASES = {
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "intermediate_size",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "n_group": "num_groups",
    "topk_group": "top_k_groups",
    "scoring_func": "score_function",
    "n_shared_experts": "num_shared_experts",
    "shared_expert_intermediate_size": "shared_intermediate_size",
}
_REQUIRED = ("intermediate_size", "num_experts", "top_k")


def resolve(named: dict[str, Any], aliases: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their own names.

    Args:
      named: arguments that have aliases, None where they were not given.
      aliases: what was given by any other name.

    Raises:
      TypeError: a name that is neither, or a required argument that was not given.
      ValueError: two names of one argument with different values.
    """
    found, given_as = dict(named), {name: name for name in named}
    for alias, value in aliases.items():
        if alias not in ALIASES:
            raise TypeError(
                f"MoE takes no argument {alias!r}; of Hugging Face's config fields it takes "
                f"{', '.join(ALIASES)}"
            )
        name = ALIASES[alias]
        if value is None:
            continue
        if found[name] is not None and found[name] != value:
            raise ValueError(
                f"{given_as[name]}={found[name]!r} and {alias}={value!r} are names of one argument "
                "with two values; pass one of them"
            )
        found[name], given_as[name] = value, alias
    missing = [name for name in _REQUIRED if found[name] is None]
    if missing:
        others = [alias for alias, name in ALIASES.items() if name == missing[0]]
        raise TypeError(f"MoE needs {missing[0]}= (or {' or '.join(others)})")
    return found
