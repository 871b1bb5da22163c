"""What `jax-iser doctor` tries out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess

_CAPABILITY = "9.0"  # what scripts build the kernels for: wgmma is there alone
_ENGINES = (
    "tensor cores (wgmma, TMA) for bf16 with hidden and intermediate sizes in whole 8s, and for "
    "FP8 weights with sizes in whole 64s; CUDA cores, which are slow, for f32 and other sizes"
)
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "safetensors")


def verdict(probe) -> dict:
    """`works`, and in words what was seen (what `probe` returns) or why not."""
    try:
        return {"works": True, "why": probe()}
    except Exception as error:  # whatever it is, it is the finding
        return {"works": False, "why": _one_line(error)}


def attempt(probe) -> list[str]:
    """What `probe` returns, or why it could not."""
    try:
        return probe()
    except Exception as error:
        return [_one_line(error)]


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def versions() -> dict[str, str]:
    """Of Python, the package and what it stands on."""
    from jax_iser import __version__

    found = {"python": platform.python_version(), "jax_iser": __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def system() -> dict:
    """The machine, as far as the CPU method cares."""
    from jax_iser._extension import is_loaded, iser

    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "cpu_isa": iser.cpu_isa() if is_loaded() else None,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS"),
    }


def devices() -> list[str]:
    """jax's devices."""
    import jax

    return [
        f"{d.platform} {d.id}, {d.device_kind}, process {d.process_index}" for d in jax.devices()
    ]


def cuda() -> dict:
    """GPUs that the driver lists, the compiler, the extension, and whether jax sees a GPU."""
    nvcc = shutil.which("nvcc")
    return {
        "gpus": _lines(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]),
        "nvcc": (_lines([nvcc, "--version"])[-1:] or [nvcc])[0] if nvcc else None,
        "extension": importlib.util.find_spec("jax_iser._iser_cuda") is not None,
        "jax_sees_gpu": _has_gpu(),
        "memory": _gpu_memory(),
        "engines": attempt(_engines),
    }


def _engines() -> list[str]:
    """Which engine `fused_moe` takes on each GPU that jax sees, and why."""
    import jax

    if not _has_gpu():
        return []
    from jax_iser._extension import iser_cuda

    lines = []
    for device in jax.devices("gpu"):
        capability = getattr(device, "compute_capability", "unknown")
        if iser_cuda is None:
            engine = "none: this build has no CUDA kernels"
        elif capability != _CAPABILITY:
            engine = f"none: the kernels are for compute capability {_CAPABILITY} alone"
        else:
            engine = _ENGINES
        lines.append(f"gpu {device.id}, {device.device_kind}, {capability}: {engine}")
    return lines


def _gpu_memory() -> str:
    """How memory of GPUs can be shared, or why it cannot."""
    from jax_iser.domain.cuda import memory

    try:
        found = memory.probe()
    except Exception as error:  # no package, no driver, no GPU: it is the finding
        return _one_line(error)
    return f"{found['handle_type']}: {found['reason']}"


def _has_gpu() -> bool:
    import jax

    try:
        return bool(jax.devices("gpu"))
    except Exception:  # jax raises several kinds where it has none
        return False


def _lines(command: list[str]) -> list[str]:
    """What a program prints; nothing where there is no such program."""
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def try_cuda(found: dict) -> tuple[dict, dict, dict]:
    """Fused method on the GPU's CUDA cores and on its tensor cores, and the unicast fabric."""
    why = []
    if not found["extension"]:
        why.append("no CUDA extension: build with ISER_CUDA=1 (docs/building.md)")
    if not found["jax_sees_gpu"]:
        why.append("jax sees no GPU")
    if why:
        no = {"works": False, "why": "; ".join(why)}
        return no, dict(no), dict(no)
    plain, unicast = try_fused("gpu")
    tensor, _ = try_fused("gpu", dtype="bfloat16", size=64)
    for engine, layer in ((plain, "f32, sizes of 16"), (tensor, "bf16, sizes of 64")):
        engine["why"] = f"{layer}: {engine['why']}"
    return plain, tensor, unicast


def multicast() -> dict:
    """Never tried: on shared hosts a multicast object can take GPUs out of service."""
    why = "not in this version: copies go to a group's members one by one (unicast), same results"
    return {"works": False, "why": why}


def share_memory() -> str:
    """What a Domain across processes stands on."""
    import socket

    os.close(os.memfd_create("jax_iser_doctor", os.MFD_CLOEXEC))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(f"\0jax_iser_doctor-{os.getpid()}")
    return (
        "anonymous memory and private sockets are allowed: processes of a host can share a Domain"
    )


def run_reference() -> str:
    """A small layer in plain JAX on the default device."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jax_iser.nnx import MoE

    moe = MoE(32, 32, num_experts=8, top_k=2, method="portable", rngs=nnx.Rngs(0))
    if not bool(jnp.isfinite(moe(jnp.ones((16, 32)))).all()):
        raise RuntimeError("the layer's output is not finite")
    return f"a small layer ran on {jax.default_backend()}"


def try_fused(backend: str, **layer) -> tuple[dict, dict]:
    """Verdicts on the fused method and on the unicast fabric, from the same two calls.

    Args:
      backend: jax's.
      **layer: dtype and size of the layer that runs.
    """
    seen = {}

    def run():
        seen.update(_run_skewed_layer(backend, **layer))
        if not seen["complete"]:
            raise RuntimeError("the layer failed: its output is NaN")
        if not seen["equal"]:
            raise RuntimeError("outputs with and without copied experts differ")
        return f"{seen['ranks']} ranks; outputs with and without copied experts are equal"

    def copies():
        if not seen.get("broadcasts"):
            raise RuntimeError("no expert was copied; see the fused method")
        return f"{seen['broadcasts']} experts were copied to other ranks"

    return verdict(run), verdict(copies)


def _run_skewed_layer(backend: str, dtype: str = "float32", size: int = 16) -> dict:
    """A layer whose routes all go to rank 0, with and without balancing."""
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec as P

    from jax_iser import Domain, ExpertWeights, moe_layer

    mesh = jax.make_mesh(
        (1,),
        ("ep",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices(backend)[:1],
    )
    tokens, experts = 64, 8
    draw = np.random.default_rng(0).standard_normal
    x = draw((tokens, size), np.float32).astype(jax.numpy.dtype(dtype))
    weights = ExpertWeights(*draw((3, experts, size, size), np.float32).astype(x.dtype))
    ids = np.tile(np.arange(2, dtype=np.int32), (tokens, 1))
    shares = np.full((tokens, 2), 0.5, np.float32)
    with Domain(
        mesh,
        "ep",
        ranks_per_device=4,
        num_experts=experts,
        top_k=2,
        hidden_size=size,
        intermediate_size=size,
        max_tokens_per_rank=tokens // 4,
        dtype=dtype,
    ) as domain:
        outputs = {}
        for balance in ("none", "haloq"):
            layer = jax.shard_map(
                lambda *args, balance=balance: moe_layer(*args, balance=balance),
                mesh=mesh,
                in_specs=P("ep"),
                out_specs=P(),
                check_vma=False,
            )
            outputs[balance] = jax.jit(layer)(x, ids, shares, weights, domain.handle)
        off, on = (np.asarray(outputs[balance][0]) for balance in ("none", "haloq"))
        return {
            "ranks": domain.config.num_ranks,
            "complete": bool(np.isfinite(on).all() and np.isfinite(off).all()),
            "equal": off.tobytes() == on.tobytes(),
            "broadcasts": int(outputs["haloq"][1].num_broadcasts),
        }
