"""Text as bytes: documents into one stream of tokens, a stream into sequences."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

SEPARATOR = 0
_SKIPPED_PARTS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def read_jsonl(path: str | Path) -> list[str]:
    """The `text` field of each line of a gzipped JSON-lines file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def read_sources(root: str | Path) -> dict[str, str]:
    """Python files under `root` by relative name, sorted, without tests and installed packages."""
    root = Path(root)
    sources = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _SKIPPED_PARTS & set(name.parts):
            text = path.read_bytes()
            if text.strip() and SEPARATOR not in text:
                sources[name.as_posix()] = text.decode("utf-8", errors="replace")
    return sources


def is_held_out(name: str) -> bool:
    """Whether a source file is never trained on: one file in twenty, by its relative name."""
    return zlib.crc32(name.encode()) % 20 == 0


def to_stream(documents: Iterable[str]) -> np.ndarray:
    """Documents as one `uint8` array, each after a separator (byte 0, which text does not hold)."""
    parts = (bytes([SEPARATOR]) + text.encode("utf-8") for text in documents)
    return np.frombuffer(b"".join(parts), np.uint8)


def sequences(stream: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """A stream cut into inputs and next-byte targets, `[n, seq_len] i32` each; the rest is left."""
    n = (len(stream) - 1) // seq_len
    if n < 1:
        raise ValueError(f"the text has {len(stream)} bytes, fewer than seq_len={seq_len} and one")
    inputs = stream[: n * seq_len].reshape(n, seq_len)
    targets = stream[1 : n * seq_len + 1].reshape(n, seq_len)
    return inputs.astype(np.int32), targets.astype(np.int32)
