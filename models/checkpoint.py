"""Save a model as safetensors with its config, and load it back."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_iser.experts.formats import float8_block128 as fp8
from jax_iser.nnx import Fp8Plane, RoutedBias

from .config import ModelConfig
from .lm import MoELM

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
# Norms, the router and its bias stay f32; rounding a router moves tokens between experts.
_F32_NAMES = ("scale", "router", "routed_bias")
_FLOATS = ("F64", "F32", "BF16", "F16")  # as safetensors names them


def _variables(model: nnx.Module) -> dict[str, nnx.Variable]:
    """The variables that a checkpoint holds, by dotted name."""
    state = nnx.state(model, nnx.Any(nnx.Param, nnx.OfType(RoutedBias), nnx.OfType(Fp8Plane)))
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def save(model: MoELM, directory: str | Path, dtype=jnp.bfloat16) -> Path:
    """Writes `model.safetensors` and `config.json`.

    Matrices are stored in `dtype`, FP8 planes as their bytes, the rest in f32.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, variable in _variables(model).items():
        value = variable.get_value()
        if not isinstance(variable, Fp8Plane):
            value = value.astype(jnp.float32 if name.endswith(_F32_NAMES) else dtype)
        tensors[name] = np.asarray(value)
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "flax-nnx"})
    model.config.save(directory / CONFIG_FILE)
    return directory / WEIGHTS_FILE


def _open(path):
    try:
        return safe_open(path, framework="flax")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from error


def stored_weight_dtype(directory: str | Path) -> str | None:
    """`"float8_e4m3fn"` where the routed experts are stored as FP8 planes, else None.

    Raises:
      ValueError: the file cannot be read.
    """
    with _open(Path(directory) / WEIGHTS_FILE) as tensors:
        dtypes = {tensors.get_slice(name).get_dtype() for name in list(tensors.keys())}
    return fp8.NAME if "U8" in dtypes else None


def _load_weights(model, path):
    """Fills the abstract `model` from the file, each tensor with the dtype and sharding it has."""
    expected = _variables(model)
    with _open(path) as tensors:
        missing = sorted(set(expected) - set(tensors.keys()))
        unknown = sorted(set(tensors.keys()) - set(expected))
        if missing or unknown:
            raise ValueError(f"{path}: tensors missing {missing}, not in the model {unknown}")
        for name, variable in expected.items():
            abstract = variable.get_value()
            stored = tensors.get_slice(name)
            shape, wanted = tuple(stored.get_shape()), abstract.shape
            quantises = isinstance(variable, Fp8Plane) and stored.get_dtype() != "U8"
            if quantises:
                wanted = _plane_shape(model.config, name)
            if shape != wanted:
                raise ValueError(
                    f"{path}: tensor {name} has shape {shape}, expected {wanted} from {CONFIG_FILE}"
                )
            _check_type(path, name, stored.get_dtype(), isinstance(variable, Fp8Plane))
            value = tensors.get_tensor(name)
            variable.set_value(_place(fp8.quantize_plane(value) if quantises else value, abstract))


def _check_type(path, name, found, is_plane):
    """Refuses a tensor that holds neither floats nor, in place of a plane, the bytes of FP8."""
    if found not in _FLOATS and not (is_plane and found == "U8"):
        expected = f"one of {', '.join(_FLOATS)}" + (
            ", or U8: the bytes of FP8" if is_plane else ""
        )
        raise ValueError(f"{path}: tensor {name} is {found}, expected {expected}")


def _plane_shape(config, name):
    """`[num_experts, rows, columns]` of a plane of the routed experts."""
    sizes = (config.intermediate_size, config.hidden_size)
    return (config.num_experts, *(sizes[::-1] if name.endswith(".down") else sizes))


def _place(value, abstract):
    value = value.astype(abstract.dtype)
    sharding = getattr(abstract, "sharding", None)
    return value if sharding is None else jax.device_put(value, sharding)


def from_pretrained(
    directory: str | Path, *, dtype=jnp.float32, weight_dtype=None, **options
) -> MoELM:
    """Loads the model that `save` wrote.

    Args:
      directory: holds `config.json` and `model.safetensors`.
      dtype: of weights and activations; norms and router stay f32.
      weight_dtype: float8_e4m3fn quantises the routed experts as they are read. Those that are
        stored so stay so.
      **options: of `MoELM`: mesh, axis, balance, method and so on.

    Raises:
      FileNotFoundError: the directory lacks one of the two files.
      ValueError: a tensor is missing, unknown or of the wrong shape or type: names file, tensor,
        what was found and what was expected. Sizes that FP8 weights do not take.
    """
    directory = Path(directory)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory / name} is missing: not a model directory")
    config = ModelConfig.load(directory / CONFIG_FILE)
    weight_dtype = weight_dtype or stored_weight_dtype(directory)
    options |= {"dtype": dtype, "param_dtype": dtype, "weight_dtype": weight_dtype}
    model = MoELM(config, rngs=nnx.Rngs(0), **options)
    _load_weights(model, directory / WEIGHTS_FILE)
    return model


def default_directory() -> Path:
    """The checkpoint that comes with the package."""
    return Path(__file__).parent / "checkpoints" / "iser-bytes-5m"
