"""Two processes with a GPU each: the bits of one process; and what one sees when the other dies."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from gpu.on_gpus import IS_GPU, Place, domain_at, num_gpus, problem_at
from gpu.peer_program import CASES, case
from layers import assert_same_bits, make_domain, run_layer
from processes import free_port

pytestmark = pytest.mark.gpu
HERE = pathlib.Path(__file__).resolve().parent
LIMIT_S = 80


@pytest.fixture
def peers(tmp_path):
    """Both processes after their cases and a common call; killed at the end and at the limit."""
    if num_gpus() < 2:
        pytest.skip(f"needs 2 GPUs, found {num_gpus()}")
    flags = os.environ.get("XLA_FLAGS", "")
    environment = dict(os.environ)
    if not IS_GPU:
        one = "--xla_force_host_platform_device_count=1"
        environment["XLA_FLAGS"] = f"{flags} {one}"  # the last one counts
    address = f"127.0.0.1:{free_port()}"
    processes = []
    for index in range(2):
        arguments = [address, "2", str(index), str(tmp_path)]
        with (tmp_path / f"stderr-{index}").open("w") as errors:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / "peer_program.py"), *arguments],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            )
    timer = threading.Timer(LIMIT_S, lambda: [process.kill() for process in processes])
    timer.start()
    try:
        for index, process in enumerate(processes):
            said = process.stdout.readline().strip()
            if said != "fine":
                words = (tmp_path / f"stderr-{index}").read_text()[-3000:]
                pytest.fail(f"process {index} said {said!r}:\n{words}")
        yield processes
    finally:
        timer.cancel()
        for process in processes:
            process.kill()
            process.communicate()


def ask(process, word) -> tuple[float, str]:
    """Sends a word; seconds and text of the answer."""
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    line = process.stdout.readline().strip()
    assert line, f"the process ended, or was killed after {LIMIT_S} s, at {word!r}"
    seconds, text = line.split(" ", 1)
    return float(seconds), text


def load(folder, name, call, y):
    """The outputs of both processes as one, and each one's plan."""
    parts = []
    for index in range(2):
        with np.load(folder / f"{name}-{call}-{index}.npz") as saved:
            parts.append(dict(saved))
    rows = np.concatenate([part["y"].reshape(len(y) // 2, -1) for part in parts])
    return rows.view(y.dtype), parts


def test_bits_of_one_process_then_a_killed_peer(peers, tmp_path):
    for name in CASES:
        problem, options = case(name)
        with make_domain(problem, **options) as domain:
            for call in range(2):
                y, plan = run_layer(problem, domain=domain)
                assert plan.num_broadcasts > 0
                found, parts = load(tmp_path, name, call, y)
                assert_same_bits(found, y, f"{name}, call {call}")
                slots = np.concatenate([part["route_slot"] for part in parts])
                assert_same_bits(slots, plan.route_slot, f"{name}, call {call}: route_slot")
                for index, part in enumerate(parts):
                    for field in set(plan._fields) - {"route_slot"}:
                        what = f"{name}, call {call}, process {index}: {field}"
                        assert_same_bits(part[field], getattr(plan, field), what)
    check_killed_peer(*peers)


def check_killed_peer(survivor, victim):
    """The other process ends with an error, well within the limit of its waits or at it."""
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait(timeout=10)
    seconds, text = ask(survivor, "call")
    assert "status " in text or "IserError" in text, text
    assert "100% NaN" in text or not IS_GPU, text
    assert seconds < 12
    seconds, text = ask(survivor, "check")
    assert "IserError" in text, text
    assert "rank 4" in text, text
    seconds, text = ask(survivor, "call")
    assert "fine" not in text
    assert seconds < 1, "a call on a failed Domain has to fail at once"
    seconds, text = ask(survivor, "close")  # of a Domain that has not failed
    assert "IserError" in text, text
    assert "rank 4" in text, text
    assert seconds < 5
    _, text = ask(survivor, "renew")
    assert text == "fine", text


@pytest.mark.skipif(not IS_GPU, reason="CPUs stage what other processes pull")
def test_rules_that_read_peers_weights_are_refused_across_processes(monkeypatch):
    from jax_iser.domain.cuda import runtime

    check = runtime._check
    monkeypatch.setattr(runtime, "_check", lambda config, is_multi_process: check(config, True))
    for rule in ("sami", "per_slot"):
        with pytest.raises(ValueError, match="ranks read each other's weights"):
            domain_at(problem_at(Place(1, 4)), Place(1, 4), copy_rule=rule)
    assert jax.process_count() == 1
