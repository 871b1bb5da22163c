"""What every test shares: eight forced CPU devices, hypothesis profiles, the gpu marker."""

import os
import pathlib
import shutil

import pytest
from hypothesis import settings

# Read once, when jax starts its CPU client: so before any test module imports jax.
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_HAS_CUDA = "cuda" in os.environ["JAX_PLATFORMS"].split(",")
if _HAS_CUDA:
    # Domains take their memory of the driver, beside what XLA has.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # NCCL would make multicast objects, which can take the GPUs of a shared host out of service.
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    # Equal products compile alike, whatever else their program holds; and compile faster.
    os.environ["XLA_FLAGS"] += " --xla_gpu_autotune_level=0"
# So many forced CPU devices stand for GPUs in tests/gpu, but for what only GPUs do; 0 skips them.
_STAND_INS = "ISER_TEST_GPUS_ON_CPU"
_GPU_TESTS = pathlib.Path(__file__).parent / "gpu"
if not _HAS_CUDA:
    os.environ.setdefault(_STAND_INS, "2")

# Programs that tests start find what tests share and the package under test from any folder, and
# not the bare sources of the folder they start in, which have no extension module.
_TESTS = str(pathlib.Path(__file__).parent)
_FOLDERS = [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(":") if each]
os.environ["PYTHONSAFEPATH"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([_TESTS, *_FOLDERS]))

# print_blob: a failure prints the line that reproduces it.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def _why_no_gpu() -> str | None:
    """Why tests marked gpu cannot run on GPUs here, or None."""
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA driver (nvidia-smi) found"
    try:
        import jax_iser._iser_cuda  # noqa: F401
    except ImportError as error:
        return f"the CUDA extension is not built: {error}"
    if not _HAS_CUDA:
        return "jax runs on CPUs alone; set JAX_PLATFORMS=cuda,cpu (scripts/test_gpu.sh does)"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu, with the reason, where neither GPUs nor CPU devices can run them."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if int(os.environ.get(_STAND_INS) or 0):
        marked = [item for item in marked if _GPU_TESTS not in item.path.parents]
    if marked and (reason := _why_no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
