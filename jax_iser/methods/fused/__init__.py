"""The XLA FFI calls of a Domain."""
