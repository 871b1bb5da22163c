"""Skips what needs more GPUs, and leaves a test's failure to that test.

A CUDA error that ends the process's context, or a hang, would fail all tests that follow. Both end
the process instead; scripts/test_gpu.sh starts another for the tests that `ISER_TEST_LOG` does not
name yet.
"""

import os
import pathlib

import pytest
from gpu.on_gpus import EIGHT, IS_GPU, num_gpus

from jax_iser import Domain

_LOST = 66  # exit status of a process whose GPU is lost
_log = pathlib.Path(os.environ["ISER_TEST_LOG"]) if "ISER_TEST_LOG" in os.environ else None


def _note(line: str) -> None:
    if _log is not None:
        with _log.open("a") as file:
            file.write(f"{line}\n")


def pytest_collection_modifyitems(config, items):
    """Leaves out what an earlier process has begun."""
    begun = set(_log.read_text().splitlines()) if _log is not None and _log.exists() else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in begun])
    items[:] = [item for item in items if item.nodeid not in begun]


def pytest_runtest_logstart(nodeid):
    """Before the test: one that kills the process is not begun again."""
    _note(nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    """Says at once what failed, since the summary may never come."""
    if _log is None or not report.failed or not report.longrepr:
        return
    print(f"\n== {report.nodeid} failed in {report.when}:\n{report.longreprtext}")
    print(report.capstdout[-1500:], report.capstderr[-1500:], sep="", flush=True)
    crash = getattr(report.longrepr, "reprcrash", None)
    report.longrepr = crash.message if crash else report.longreprtext[-300:]


def pytest_sessionfinish(exitstatus):
    """The last line says that no test is left."""
    if exitstatus in (0, 1, 5):
        _note("finished")


@pytest.fixture(autouse=True)
def _enough_gpus(request):
    spec = getattr(request.node, "callspec", None)
    place = spec.params.get("place") if spec else None
    if place is not None and place.gpus > num_gpus():
        pytest.skip(f"needs {place.gpus} GPUs, found {num_gpus()}")


@pytest.fixture(autouse=True)
def _failures_are_told(monkeypatch):
    """What a Domain knows when it ends, which the test's own failure would hide."""
    failure_of = Domain._failure

    def tell(domain):
        failure = failure_of(domain)
        if failure is not None:
            print(f"the Domain has failed: {failure}")
        return failure

    monkeypatch.setattr(Domain, "_failure", tell)


@pytest.fixture
def widest():
    """Eight ranks on as many GPUs as there are."""
    return EIGHT[1] if num_gpus() > 1 else EIGHT[0]


@pytest.fixture(autouse=True)
def _gpus_work():
    """Ends the process where the test has cost it its GPU; counts misuse for this test alone."""
    yield
    if not IS_GPU:
        return
    import jax

    from jax_iser._extension import iser_cuda

    try:
        for device in jax.local_devices():
            (jax.device_put(1.0, device) + 1).block_until_ready()
    except Exception as error:
        pytest.exit(f"the GPU is lost to this process: {error}", returncode=_LOST)
    left = 0
    for device in jax.local_devices():
        try:
            left += iser_cuda.take_misuse(device.local_hardware_id)
        except ValueError:  # no Domain has been there
            continue
    assert left == 0, f"{left} calls named a Domain that is not open or of other sizes"
