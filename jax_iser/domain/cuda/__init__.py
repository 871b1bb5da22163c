"""A Domain on GPUs."""
