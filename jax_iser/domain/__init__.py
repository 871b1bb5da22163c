"""The Domain: symmetric memory and membership of an expert-parallel group."""

from jax_iser.domain.config import DomainConfig as DomainConfig
from jax_iser.domain.domain import STAGES as STAGES
from jax_iser.domain.domain import Domain as Domain
from jax_iser.domain.domain import Timeline as Timeline
from jax_iser.domain.domain import describe as describe
from jax_iser.domain.domain import keep_open as keep_open
from jax_iser.domain.handle import DomainHandle as DomainHandle
