"""Experts: the planes of a bundle, formats of weights, activations."""
