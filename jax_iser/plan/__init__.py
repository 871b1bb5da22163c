"""Plans of layer calls: their types, their knobs, and HALO-Q on counts."""

from jax_iser.plan.counts import plan_counts as plan_counts
from jax_iser.plan.counts import plan_many as plan_many
from jax_iser.plan.groups import GroupLevel as GroupLevel
from jax_iser.plan.groups import group_levels as group_levels
from jax_iser.plan.knobs import COPY_RULES as COPY_RULES
from jax_iser.plan.knobs import check_plan_arguments as check_plan_arguments
from jax_iser.plan.knobs import check_plan_knobs as check_plan_knobs
from jax_iser.plan.types import CountsPlan as CountsPlan
from jax_iser.plan.types import Plan as Plan
from jax_iser.plan.types import PlanBatch as PlanBatch
