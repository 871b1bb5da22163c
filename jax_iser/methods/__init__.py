"""The ways to compute a layer: one package per method."""
