"""Starts programs of several processes that meet through jax.distributed on this host."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import time

TESTS = pathlib.Path(__file__).resolve().parent


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def environment(num_devices: int) -> dict[str, str]:
    """This process's, with the helpers of the tests to import and forced CPU devices."""
    paths = [str(TESTS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "JAX_PLATFORMS": "cpu",
    }


def start_processes(program, num_processes, num_devices, *arguments) -> list[subprocess.Popen]:
    """`python program ADDRESS NUM_PROCESSES PROCESS *arguments`, with pipes to all of them."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(program), address, str(num_processes)]
    return [
        subprocess.Popen(
            [*command, str(index), *arguments],
            env=environment(num_devices),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(num_processes)
    ]


def finish(processes, limit_s: float) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each; kills what is left at the limit and says so."""
    deadline = time.monotonic() + limit_s
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            results.append((process.returncode, out, err))
    except subprocess.TimeoutExpired as error:
        for process in processes:
            process.kill()
        tails = [process.communicate()[1][-3000:] for process in processes]
        raise AssertionError(
            f"still running after {limit_s} s:\n" + "\n--\n".join(tails)
        ) from error
    return results


def join(argv):
    """Called by the programs: initialises jax.distributed; `(process, other arguments)`."""
    import jax

    address, num_processes, index, *rest = argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, int(num_processes), int(index), cluster_detection_method="deactivate"
    )
    return int(index), rest


def globally(mesh, array):
    """The array sharded over the mesh's axis, each process giving its own part."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
