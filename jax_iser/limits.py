"""The largest sizes that every part takes: ffi/core/limits.h for builds without the extension."""

MAX_RANKS = 72
MAX_EXPERTS = 1024
MAX_HELPER_SLOTS = 16
MAX_LAYERS = 1 << 16
MAX_LOCAL_SLOTS = 2048
MAX_PLANES = 6
