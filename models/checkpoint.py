"""Save a model as safetensors with its config, and load it back."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .config import ModelConfig
from .lm import MoELM

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
# Norms, the router and its bias stay f32; rounding a router moves tokens between experts.
_F32_NAMES = ("scale", "router", "routed_bias")


def _variables(model: nnx.Module) -> dict[str, nnx.Variable]:
    """The variables that a checkpoint holds, by dotted name."""
    state = nnx.state(model, nnx.Any(nnx.Param, nnx.OfType(_routed_bias_type())))
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def _routed_bias_type():
    from jax_iser.nnx import RoutedBias

    return RoutedBias


def save(model: MoELM, directory: str | Path, dtype=jnp.bfloat16) -> Path:
    """Writes `model.safetensors` (matrices in `dtype`, the rest f32) and `config.json`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, variable in _variables(model).items():
        kept = jnp.float32 if name.endswith(_F32_NAMES) else dtype
        tensors[name] = np.asarray(variable.get_value().astype(kept))
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "flax-nnx"})
    model.config.save(directory / CONFIG_FILE)
    return directory / WEIGHTS_FILE


def _load_weights(model, path):
    """Fills the abstract `model` from the file, each tensor with the dtype and sharding it has."""
    expected = _variables(model)
    try:
        tensors = safe_open(path, framework="flax")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from error
    with tensors:
        missing = sorted(set(expected) - set(tensors.keys()))
        unknown = sorted(set(tensors.keys()) - set(expected))
        if missing or unknown:
            raise ValueError(f"{path}: tensors missing {missing}, not in the model {unknown}")
        for name, variable in expected.items():
            abstract = variable.get_value()
            shape = tuple(tensors.get_slice(name).get_shape())
            if shape != abstract.shape:
                raise ValueError(
                    f"{path}: tensor {name} has shape {shape}, expected {abstract.shape} from "
                    f"{CONFIG_FILE}"
                )
            variable.set_value(_place(tensors.get_tensor(name), abstract))


def _place(value, abstract):
    value = value.astype(abstract.dtype)
    sharding = getattr(abstract, "sharding", None)
    return value if sharding is None else jax.device_put(value, sharding)


def from_pretrained(directory: str | Path, *, dtype=jnp.float32, **options) -> MoELM:
    """Loads the model that `save` wrote.

    Args:
      directory: holds `config.json` and `model.safetensors`.
      dtype: of weights and activations; norms and router stay f32.
      **options: of `MoELM`: mesh, axis, balance, method and so on.

    Raises:
      FileNotFoundError: the directory lacks one of the two files.
      ValueError: a tensor is missing, unknown or of the wrong shape: names file, tensor, the
        shape found and the one expected.
    """
    directory = Path(directory)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory / name} is missing: not a model directory")
    config = ModelConfig.load(directory / CONFIG_FILE)
    model = MoELM(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0), **options)
    _load_weights(model, directory / WEIGHTS_FILE)
    return model


def default_directory() -> Path:
    """The checkpoint that comes with the package."""
    return Path(__file__).parent / "checkpoints" / "iser-bytes-5m"
