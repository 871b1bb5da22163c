"""What a trace may be refused for, and how large it may be."""

from __future__ import annotations

import dataclasses
from pathlib import Path


class TraceError(ValueError):
    """A trace that cannot be read: names file, field, found and expected."""

    def __init__(self, path, field: str, found, expected: str):
        self.path, self.field, self.found, self.expected = Path(path), field, found, expected
        super().__init__(f"{path}: {field}: found {found}; expected {expected}")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Caps on what a reader takes from a file.

    Attributes:
      layers, experts, top_k, ranks: largest sizes.
      tokens: tokens of one trace.
      text_bytes: a JSON file, which is parsed whole.
      line_bytes: a line of a JSON-lines file.
      pickle_bytes: the pickle within a `.pt` archive, without its tensors.
      members: files within an archive.
      unpacked_bytes: an archive member that is read whole, unpacked.
      ratio: unpacked over packed size of an archive member above 1 MiB.
    """

    layers: int = 1024
    experts: int = 1024
    top_k: int = 64
    ranks: int = 1024
    tokens: int = 2**31
    text_bytes: int = 2**30
    line_bytes: int = 2**26
    pickle_bytes: int = 2**26
    members: int = 2**20
    unpacked_bytes: int = 2**32
    ratio: float = 250.0


LIMITS = Limits()


def check_size(path, field: str, value: object, limit: int, low: int = 1) -> int:
    """The value, where it is an integer within `[low, limit]`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= limit:
        raise TraceError(path, field, repr(value), f"an integer from {low} to {limit}")
    return value
