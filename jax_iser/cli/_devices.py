"""Devices for a command: CPU devices as many as its ranks need, in one process or in several, or
the GPUs that there are."""

from __future__ import annotations

import os
import re
import sys

from jax_iser.cli._output import Failure, UsageError

_FLAG = "--xla_force_host_platform_device_count"
_AUTOTUNE = "--xla_gpu_autotune_level"


def force_devices(num_devices: int, why: str) -> None:
    """Makes XLA offer `num_devices` CPU devices, before its first use; a user's flag is respected.

    Args:
      num_devices: how many this process needs.
      why: what needs them, for the error.

    Raises:
      UsageError: the user's own flag asks for fewer.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    asked = re.findall(rf"{_FLAG}=(\d+)", flags)
    if not asked:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={num_devices}".strip()
    elif int(asked[-1]) < num_devices:  # XLA takes the last one
        raise UsageError(
            f"XLA_FLAGS has {_FLAG}={asked[-1]}, but {why} needs {num_devices} devices; raise it, "
            "drop it (the command sets it), or put more ranks on a device (--ranks-per-device)"
        )
    if not os.environ.get("JAX_PLATFORMS"):
        import jax

        jax.config.update("jax_platforms", "cpu")


def count_gpus(platform: str, method: str) -> int:
    """GPUs to run on; 0: run on CPUs. Starts jax where the driver has GPUs.

    Args:
      platform: "auto", "cpu" or "gpu". "auto" takes CPUs wherever GPUs cannot be used.
      method: of the layer; one that needs a Domain needs kernels and cuda-python too.

    Raises:
      UsageError: "gpu" where GPUs cannot be used.
    """
    if platform == "cpu":
        return 0
    from jax_iser.methods import find_method

    asked = os.environ.get("JAX_PLATFORMS", "")
    try:
        if asked and not {"cuda", "gpu"} & set(asked.split(",")):
            raise RuntimeError(f"JAX_PLATFORMS={asked} leaves GPUs out")
        if platform == "auto" or find_method(method).needs_domain:
            _require_kernels()
        return _start_gpus()
    except Exception as error:  # jax and the driver raise several kinds
        if platform == "gpu":
            text = " ".join(str(error).split())
            raise UsageError(f"--platform gpu: {text}") from error
        return 0


def _require_kernels() -> None:
    from jax_iser._extension import iser_cuda
    from jax_iser.domain.cuda.driver import Driver

    if iser_cuda is None:
        raise RuntimeError("this build of jax_iser has no CUDA kernels (docs/building.md)")
    if not Driver().call("cuDeviceGetCount"):
        raise RuntimeError("the driver has no GPU")


def _start_gpus() -> int:
    flags = os.environ.get("XLA_FLAGS", "")
    if _AUTOTUNE not in flags:  # or equal products of two programs may differ in their last bits
        os.environ["XLA_FLAGS"] = f"{flags} {_AUTOTUNE}=0".strip()
    try:
        import jax

        return len(jax.devices("gpu"))
    except BaseException:
        os.environ["XLA_FLAGS"] = flags
        raise


def join_processes(coordinator: str, num_processes: int, process_id: int) -> None:
    """Joins the other processes through `jax.distributed`, with gloo between the CPUs.

    Raises:
      Failure: the others did not come.
    """
    import jax

    _keep_native_prints_off_stdout()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, cluster_detection_method="deactivate"
        )
    except Exception as error:  # jax raises several kinds
        raise Failure(f"process {process_id} could not join {coordinator}: {error}") from error


def _keep_native_prints_off_stdout() -> None:
    """Gloo reports its connections on descriptor 1; from here on only Python writes there."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(stdout, "w", buffering=1)


def make_mesh(num_devices: int, platform: str = "cpu", axis: str = "ep"):
    """A mesh of one axis over the first devices of every process, in process order.

    Args:
      num_devices: of all processes.
      platform: "cpu" or "gpu".

    Raises:
      UsageError: there are fewer devices.
      Failure: jax does not start.
    """
    import jax

    try:
        devices, processes = jax.devices(platform), jax.process_count()
    except Exception as error:  # jax raises several kinds
        text = str(error) or f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        raise Failure(f"jax found no device: {text}") from error
    each = num_devices // processes
    by_process: dict[int, list] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    fewest = min(map(len, by_process.values()))
    if fewest < each or len(by_process) < processes:
        remedy = "put more ranks on each (--ranks-per-device)"
        if platform == "cpu":
            remedy = f"set XLA_FLAGS={_FLAG}={each} before anything uses jax"
        raise UsageError(
            f"jax started with {fewest} {platform} devices in a process, but {each} are needed; "
            f"{remedy}"
        )
    chosen = [device for p in sorted(by_process) for device in by_process[p][:each]]
    return jax.make_mesh(
        (num_devices,), (axis,), axis_types=(jax.sharding.AxisType.Auto,), devices=chosen
    )
