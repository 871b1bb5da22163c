"""The model and the text of a command."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from zlib import crc32

import numpy as np

from jax_iser.cli._output import Failure, UsageError


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """`--model DIRECTORY`."""
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="directory with config.json and model.safetensors (default: the model that comes with "
        "the package)",
    )


def model_directory(args: argparse.Namespace) -> Path:
    """The directory asked for, with both files in it.

    Raises:
      UsageError: it is not a model's.
    """
    from jax_iser.models import checkpoint

    path = Path(args.model) if args.model else checkpoint.default_directory()
    for name in (checkpoint.CONFIG_FILE, checkpoint.WEIGHTS_FILE):
        if not (path / name).is_file():
            raise UsageError(f"--model {path} is not a model: it has no {name}")
    return path


def load_config(path: Path):
    """The `ModelConfig` of a model directory; Failure where it cannot be read."""
    from jax_iser.models import ModelConfig
    from jax_iser.models.checkpoint import CONFIG_FILE

    try:
        return ModelConfig.load(path / CONFIG_FILE)
    except (ValueError, TypeError, OSError) as error:
        raise Failure(f"{path / CONFIG_FILE}: {error}") from error


def stored_weight_dtype(path: Path) -> str | None:
    """`jax_iser.models.checkpoint.stored_weight_dtype`; Failure where the file is unreadable."""
    from jax_iser.models import checkpoint

    try:
        return checkpoint.stored_weight_dtype(path)
    except ValueError as error:
        raise Failure(str(error)) from error


def load_model(path: Path, **options):
    """`jax_iser.models.from_pretrained`; Failure where the file does not fit its config."""
    from jax_iser.models import from_pretrained

    try:
        return from_pretrained(path, **options)
    except (ValueError, TypeError, OSError) as error:
        raise Failure(str(error)) from error


def read_files(paths: list[str]) -> np.ndarray:
    """Files as one stream of bytes, each after a separator, `[bytes] u8`.

    Raises:
      UsageError: a file that cannot be read.
    """
    from jax_iser.models.data import SEPARATOR

    parts = []
    for path in paths:
        try:
            parts.append(bytes([SEPARATOR]) + Path(path).read_bytes())
        except OSError as error:
            raise UsageError(f"--text {path}: {error.strerror}") from error
    return np.frombuffer(b"".join(parts), np.uint8)


def read_standard_library(num_bytes: int) -> tuple[np.ndarray, str]:
    """`num_bytes` of Python's own standard library (or all), and a line that says what it is.

    Files that the bundled model was never trained on come first, the others follow only where more
    is asked for; each in an order that mixes their subjects, by a checksum of the name.
    """
    from jax_iser.models.data import is_held_out, read_sources, to_stream

    root = sysconfig.get_path("stdlib")
    sources = read_sources(root)
    names = sorted(sources, key=lambda name: (not is_held_out(name), crc32(name.encode())))
    chosen, size = [], 0
    for name in names:
        if size >= num_bytes:
            break
        chosen.append(name)
        size += 1 + len(sources[name].encode())
    kind = "held-out" if all(map(is_held_out, chosen)) else "held-out, then other"
    stream = to_stream(sources[name] for name in chosen)[:num_bytes]
    return stream, f"{len(chosen)} {kind} source files of the standard library, {root}"
