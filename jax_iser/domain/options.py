"""A `DomainConfig` as the extensions take it."""

from __future__ import annotations

from jax_iser._extension import iser
from jax_iser.domain.config import DTYPES, DomainConfig
from jax_iser.experts.activation import Activation
from jax_iser.experts.formats import TOKEN_FORMATS
from jax_iser.plan.knobs import COPY_RULES


def shape_of(config: DomainConfig, is_multi_process: bool) -> iser.DomainShape:
    """Sizes of a rank's block of symmetric memory."""
    is_staging = is_multi_process and config.platform == "cpu"
    return iser.DomainShape(
        num_ranks=config.num_ranks,
        num_experts=config.num_experts,
        num_helper_slots=config.num_helper_slots,
        top_k=config.top_k,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        max_tokens=config.max_tokens_per_rank,
        element_bytes=DTYPES[config.dtype],
        num_banks=config.num_banks,
        num_staged=min(config.num_helper_slots, config.num_home) if is_staging else 0,
        weight_format=config.format.index,
        token_format=TOKEN_FORMATS.index(config.token_format),
        has_biases=config.expert_biases,
        activation=_activation(config.activation),
    )


def _activation(activation: Activation) -> iser.Activation:
    values = (activation.limit, activation.alpha, activation.offset)
    return iser.Activation(activation.index, *(value or 0.0 for value in values))


def options_of(config: DomainConfig, is_multi_process: bool) -> iser.DomainOptions:
    """Sizes and knobs of a Domain."""
    assert config.max_routes_per_rank is not None  # the configuration has set it
    return iser.DomainOptions(
        shape=shape_of(config, is_multi_process),
        is_bf16=config.dtype == "bfloat16",
        min_group_size=config.min_group_size,
        min_routes=config.min_routes,
        gain_threshold=config.gain_threshold,
        copy_rule=COPY_RULES.index(config.copy_rule),
        resident=config.resident,
        num_layers=config.num_layers,
        ranks_per_device=config.ranks_per_device,
        max_routes_per_rank=config.max_routes_per_rank,
        timeout_s=config.timeout_s,
        startup_timeout_s=config.startup_limit_s(is_multi_process),
        poison=config.poison,
        sizes=config.digest,
    )
