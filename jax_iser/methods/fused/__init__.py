"""`method="fused"`: the XLA FFI calls of a Domain."""
