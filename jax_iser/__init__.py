"""jax_iser: expert-parallel MoE layers in JAX that balance their ranks at every call."""
