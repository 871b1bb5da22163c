"""Symmetric memory of GPUs on a model of the driver; on the driver itself where there is a GPU."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from fake_cuda_driver import GRANULARITY, CUdevice_attribute, CUresult, FakeDriver, open_descriptors

from jax_iser.domain import rendezvous
from jax_iser.domain.cuda import driver as cuda_driver
from jax_iser.domain.cuda.driver import CudaError, Devices, Driver
from jax_iser.domain.cuda.memory import OutOfCudaMemoryError, allocate, exchange, probe

SIZE = 3 * GRANULARITY - 5
# The order that the driver's documentation asks for.
TAKEN = ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"]
RELEASED = ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]


@pytest.fixture
def driver():
    """Two GPUs; nothing of them may be left at the end."""
    with leak_checked(FakeDriver()) as fake:
        yield fake


@contextlib.contextmanager
def leak_checked(fake):
    before = open_descriptors()
    yield fake
    assert fake.leaks() == []
    assert open_descriptors() == before


def calls_of(fake, names):
    return [name for name in fake.calls if name in names]


def wait_until(condition, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


# Allocation


def test_memory_is_zero_rounded_up_and_readable(driver):
    with allocate([0, 1], SIZE, driver=driver) as memory:
        assert [segment.ordinal for segment in memory.segments] == [0, 1]
        assert memory.handle_type == "posix_fd"
        assert memory.reason == "fabric handles were not asked for"
        for segment in memory.segments:
            assert segment.nbytes == SIZE
            assert segment.mapped_bytes == 3 * GRANULARITY
            assert segment.address % GRANULARITY == 0
            assert memory.read(segment.address, segment.mapped_bytes) == bytes(3 * GRANULARITY)
        assert driver._used == [3 * GRANULARITY] * 2


def test_every_device_may_use_the_memory_of_every_other(driver):
    with allocate([0, 1], 1, driver=driver) as memory:
        for segment in memory.segments:
            for ordinal in (0, 1):
                memory.devices.write(ordinal, segment.address + 7, bytes([ordinal + 1]))
                assert memory.devices.read(ordinal, segment.address + 7, 1)[0] == ordinal + 1


def test_order_of_calls(driver):
    allocate([0], 1, driver=driver).close()
    assert calls_of(driver, TAKEN + RELEASED) == TAKEN + RELEASED


def test_close_twice_and_use_after(driver):
    memory = allocate([0], 1, driver=driver)
    (segment,), address = memory.segments, memory.segments[0].address
    memory.close()
    memory.close()
    segment.close()
    with pytest.raises(ValueError, match="closed"):
        memory.read(address, 1)
    with pytest.raises(ValueError, match="closed"):
        segment.export()


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one(driver, size):
    with pytest.raises(ValueError, match=f"bytes_per_device={size}"):
        allocate([0], size, driver=driver)


@pytest.mark.parametrize("ordinals", [[], [0, 0]])
def test_devices_once_each(driver, ordinals):
    with pytest.raises(ValueError, match="once"):
        allocate(ordinals, 1, driver=driver)


def test_no_such_device(driver):
    with pytest.raises(
        CudaError, match=r"cuDeviceGet on GPU 2: CUDA_ERROR_INVALID_DEVICE; .*VISIB"
    ):
        allocate([2], 1, driver=driver)


def test_other_contexts_are_current_again(driver):
    driver.cuInit(0)
    driver.cuDevicePrimaryCtxRetain(1)
    driver.cuCtxPushCurrent(1001)
    allocate([0], 1, driver=driver).close()
    assert driver._stack() == [1]
    driver.cuCtxPopCurrent()
    driver.cuDevicePrimaryCtxRelease(1)


# Failures


def everything(driver, fabric=True):
    """Each function of the memory, once."""
    with allocate([0, 1], SIZE, fabric=fabric, driver=driver) as memory:
        fd, note = memory.segments[1].export()
        try:
            peer = memory.import_peer(fd, note)
        finally:
            os.close(fd)
        memory.write(peer.address, b"abc")
        assert memory.read(memory.segments[1].address, 3) == b"abc"
        return memory.reason


# What an undoing call leaves when it fails; everything else is released all the same.
LEFT = {
    "cuMemUnmap": {"mappings", "reserved addresses", "bytes"},
    "cuMemAddressFree": {"reserved addresses"},
    "cuMemRelease": {"handles", "bytes"},
    "cuMemFreeHost": {"pinned buffers"},
    "cuStreamDestroy": {"streams"},
    "cuDevicePrimaryCtxRelease": {"contexts retained"},
    "cuCtxPopCurrent": {"contexts on the stack"},
    # Whatever needs the context:
    "cuCtxPushCurrent": {"pinned buffers", "streams"},
}


@pytest.mark.parametrize("fabric", [False, True])
def test_a_failure_of_any_call_undoes_the_earlier_ones(fabric):
    rehearsal = FakeDriver(fabric=fabric)
    assert ("worked" in everything(rehearsal)) == fabric
    assert rehearsal.leaks() == []
    for step, name in enumerate(rehearsal.calls):
        fake = FakeDriver(fabric=fabric)
        fake.fail_at = {step}
        before = open_descriptors()
        reason, error = None, None
        try:
            reason = everything(fake)
        except CudaError as caught:
            error = caught
        if error is None:  # a trial of fabric handles may fail
            assert f"do not work: {name}" in reason, (step, name)
        else:
            assert (error.call, error.result) == (name, "CUDA_ERROR_UNKNOWN"), step
            assert str(error).startswith(name)
        left = {each.split(" ", 1)[1] for each in fake.leaks()}
        assert left <= LEFT.get(name, set()), (step, name)
        if name not in LEFT:
            assert open_descriptors() == before, (step, name)
        fake.drain()


def test_after_a_fault_every_call_fails_and_close_still_ends():
    rehearsal = FakeDriver()
    everything(rehearsal, fabric=False)
    for step, name in enumerate(rehearsal.calls):
        fake = FakeDriver()
        fake.fail_from, fake.failure = step, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        with pytest.raises(CudaError, match=r"ILLEGAL_ADDRESS; an earlier kernel") as caught:
            everything(fake, fabric=False)
        assert caught.value.call == name
        fake.drain()


def test_a_failed_allocation_closes_its_devices_once(driver):
    devices = Devices([0], driver)
    devices.retain()
    driver.device_bytes = 0
    with pytest.raises(OutOfCudaMemoryError):
        allocate(devices, 1)
    assert devices.memory_info(0) == (0, 0)  # still open
    devices.close()
    with pytest.raises(ValueError, match="closed"):
        devices.retain()


def test_out_of_memory_tells_sizes_and_settings(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    with leak_checked(FakeDriver(device_bytes=100 * GRANULARITY)) as fake:
        with (
            allocate([0], 60 * GRANULARITY, driver=fake),
            pytest.raises(OutOfCudaMemoryError) as caught,
        ):
            allocate([1, 0], 50 * GRANULARITY, driver=fake)
        text = str(caught.value)
        assert isinstance(caught.value, MemoryError)
        assert "GPU 0 (Fake GPU 0)" in text
        assert f"{50 * GRANULARITY:,} bytes are wanted" in text
        assert f"{40 * GRANULARITY:,} of {100 * GRANULARITY:,} are free" in text
        # 0.75 that XLA takes by default, less the 10 % that lack, less 2 %
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.63 " in text
        assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in text
        assert "describe" in text
        with pytest.raises(OutOfCudaMemoryError) as caught:
            allocate([0], 200 * GRANULARITY, driver=fake)
        assert "FRACTION" not in str(caught.value)  # it would not help


def test_no_peer_access_names_both_and_the_remedy():
    with leak_checked(FakeDriver(3, no_access=[(2, 0)])) as fake:
        with pytest.raises(CudaError) as caught:
            allocate([0, 1, 2], 1, driver=fake)
        assert "GPU 2 (Fake GPU 2) cannot access the memory of GPU 0" in str(caught.value)
        assert "ranks_per_device" in str(caught.value)
        assert 'method="portable"' in str(caught.value)
        assert "cuMemCreate" not in fake.calls
        allocate([0, 1], 1, driver=fake).close()


def test_no_access_to_the_device_of_another_process():
    """It may be invisible here: only mapping its memory shows it."""
    with leak_checked(FakeDriver(1)) as fake, leak_checked(FakeDriver(1, first_device=1)) as peer:
        fake.no_access = {(0, 1)}
        with allocate([0], 1, driver=fake) as mine, allocate([0], 1, driver=peer) as theirs:
            fd, note = theirs.segments[0].export()
            with contextlib.closing(os.fdopen(fd)), pytest.raises(CudaError) as caught:
                mine.import_peer(fd, note)
        assert "on GPU 0 (Fake GPU 0) to memory of GPU 0 (Fake GPU 0) of process 0" in str(
            caught.value
        )
        assert "ranks_per_device" in str(caught.value)


@pytest.mark.parametrize("name", ["VIRTUAL_MEMORY_MANAGEMENT", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"])
def test_a_device_without_what_sharing_needs(driver, name):
    driver.attributes[CUdevice_attribute[f"CU_DEVICE_ATTRIBUTE_{name}_SUPPORTED"]] = 0
    with pytest.raises(CudaError, match=rf"GPU 0 \(Fake GPU 0\) says .*{name}_SUPPORTED is 0"):
        allocate([0, 1], 1, driver=driver)


def test_bindings_that_are_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ImportError, match=r"pip install jax-iser\[cuda\]"):
        allocate([0], 1)


def test_a_driver_that_is_not_installed(driver):
    class Bindings:
        def cuInit(self, flags):  # noqa: N802
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    with pytest.raises(CudaError, match=r"libcuda\.so\.1; install the NVIDIA driver"):
        allocate([0], 1, driver=Bindings())


# Other processes


def test_what_another_process_exports_is_the_same_memory():
    with leak_checked(FakeDriver()) as fake, leak_checked(FakeDriver(1, first_device=2)) as other:
        mine, theirs = allocate([0, 1], SIZE, driver=fake), allocate([0], SIZE, driver=other)
        fd, note = theirs.segments[0].export()
        peer = mine.import_peer(fd, note)
        os.close(fd)
        assert (peer.ordinal, peer.nbytes) == (-1, SIZE)
        assert peer.owner == "GPU 0 (Fake GPU 0) of process 0"
        assert note["address"] == theirs.segments[0].address != peer.address
        theirs.write(note["address"] + 11, b"from its owner")
        assert mine.read(peer.address + 11, 14) == b"from its owner"
        mine.write(peer.address, b"to it")
        assert theirs.read(note["address"], 5) == b"to it"
        theirs.close()  # the memory lives on where it is mapped
        assert mine.read(peer.address, 5) == b"to it"
        mine.close()


def exchange_of_two(fakes, marks):
    """What two processes, as two threads, get of an exchange: (memory, segments) or the error."""
    sockets = socket.socketpair()
    counts = [fake.num_devices for fake in fakes]
    results = [None, None]

    def work(index):
        alive = sockets[index].fileno()
        specs = [(-1, i, 1, -1 if i == index else alive) for i in range(2)]
        members = rendezvous.Members(specs, index, sockets=[sockets[index]])
        memory = allocate(range(counts[index]), SIZE, driver=fakes[index])
        try:
            found = exchange(memory, members, memory.segments, counts, marks[index])
            results[index] = memory, found
        except RuntimeError as error:
            memory.close()
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for each in sockets:
        each.close()
    return results


def test_exchange_between_processes_of_unlike_numbers_of_devices():
    with leak_checked(FakeDriver(3)) as fake, leak_checked(FakeDriver(1, first_device=3)) as other:
        (memory, found), (other_memory, other_found) = exchange_of_two([fake, other], [0, 0])
        assert [len(each) for each in found] == [len(each) for each in other_found] == [3, 1]
        assert found[0] == memory.segments
        assert other_found[1] == other_memory.segments
        for index, segment in enumerate(memory.segments):
            memory.write(segment.address, bytes([index + 1]))
            assert other_memory.read(other_found[0][index].address, 1)[0] == index + 1
        memory.close()
        other_memory.close()


def test_exchange_of_different_things():
    with leak_checked(FakeDriver(1)) as fake, leak_checked(FakeDriver(1, first_device=1)) as other:
        errors = exchange_of_two([fake, other], [3, 4])
        assert "process 1 shares memory 4, this one 3" in str(errors[0])
        assert "process 0 shares memory 3, this one 4" in str(errors[1])


def test_importing_something_else(driver):
    with allocate([0], 1, driver=driver) as memory:
        fd, note = memory.segments[0].export()
        os.close(fd)
        with open(os.devnull) as file, pytest.raises(CudaError, match=r"Shareable.*INVALID_VALUE"):
            memory.import_peer(file.fileno(), note)


def test_another_size_than_exported(driver):
    with allocate([0], 1, driver=driver) as memory:
        fd, note = memory.segments[0].export()
        note["mapped_bytes"] += GRANULARITY
        with (
            contextlib.closing(os.fdopen(fd)),
            pytest.raises(CudaError, match=r"cuMemMap on GPU 0"),
        ):
            memory.import_peer(fd, note)


def test_descriptors_are_not_inherited(driver):
    with allocate([0], 1, driver=driver) as memory:
        fd, _ = memory.segments[0].export()
        assert not os.get_inheritable(fd)
        os.close(fd)


PEER = """
import faulthandler, os, sys, socket
faulthandler.dump_traceback_later(25, exit=True)
from fake_cuda_driver import FakeDriver
from jax_iser.domain.rendezvous import _receive_fd, _send_fd
from jax_iser.domain.cuda.memory import allocate
driver = None if sys.argv[2] == "real" else FakeDriver(1, first_device=1)
sock = socket.socket(fileno=int(sys.argv[1]))
with allocate([int(sys.argv[3])], 100_000, driver=driver) as memory:
    (mine,) = memory.segments
    fd, note = mine.export()
    _send_fd(sock, fd, note)
    os.close(fd)
    fd, note = _receive_fd(sock)
    peer = memory.import_peer(fd, note)
    os.close(fd)
    memory.write(peer.address, b"written by a peer")
    sock.sendall(b"1")
    assert sock.recv(1) == b"2"
    assert memory.read(mine.address, 7) == b"by mine"
"""


@contextlib.contextmanager
def peer_process(kind, device):
    """A socket to a process that runs PEER; it ends well, or its stderr is told."""
    here, there = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", PEER, str(there.fileno()), kind, str(device)],
        pass_fds=[there.fileno()],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},  # it asks JAX for the process's index alone
        stderr=subprocess.PIPE,
        text=True,
    )
    there.close()
    here.settimeout(40)
    with process, here:
        try:
            yield here
            here.shutdown(socket.SHUT_WR)
            told = process.communicate(timeout=40)[1]
        except BaseException as error:
            here.close()  # whatever it waits for has come to an end
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            told = process.communicate()[1]
            error.add_note(f"the peer ended with {process.returncode} and said: {told}")
            raise
        assert process.returncode == 0, told


def swap_with_another_process(driver, kind, device, peer_device):
    with allocate([device], 100_000, driver=driver) as memory:
        (mine,) = memory.segments
        with peer_process(kind, peer_device) as sock:
            fd, note = mine.export()
            rendezvous._send_fd(sock, fd, note)
            os.close(fd)
            fd, note = rendezvous._receive_fd(sock)
            peer = memory.import_peer(fd, note)
            os.close(fd)
            memory.write(peer.address, b"by mine")
            assert sock.recv(1) == b"1"
            sock.sendall(b"2")
        assert memory.read(mine.address, 17) == b"written by a peer"
        # Its process has ended; its memory is still mapped here.
        assert memory.read(peer.address, 7) == b"by mine"


def test_two_processes(driver):
    swap_with_another_process(driver, "fake", 0, 0)


# Handle types


def test_fabric_handles_where_they_work():
    with (
        leak_checked(FakeDriver(fabric=True)) as fake,
        allocate([0, 1], SIZE, fabric=True, driver=fake) as memory,
    ):
        assert memory.handle_type == "fabric"
        fd, note = memory.segments[1].export()
        peer = memory.import_peer(fd, note)
        os.close(fd)
        memory.write(peer.address, b"fabric")
        assert memory.read(memory.segments[1].address, 6) == b"fabric"


def test_descriptors_where_fabric_handles_do_not_work(driver):
    with allocate([0], 1, fabric=True, driver=driver) as memory:
        assert memory.handle_type == "posix_fd"
        assert memory.reason == (
            "fabric handles do not work: cuMemCreate on GPU 0 (Fake GPU 0): "
            "CUDA_ERROR_NOT_PERMITTED; fabric handles need an IMEX channel "
            "(/dev/nvidia-caps-imex-channels) on each host"
        )


def test_fabric_handles_only_when_asked_for():
    with leak_checked(FakeDriver(fabric=True)) as fake, allocate([0], 1, driver=fake) as memory:
        assert memory.handle_type == "posix_fd"


def test_probe(driver):
    found = probe(driver)
    assert [each["uuid"] for each in found["devices"]] == [
        "GPU-00000000-0000-0000-0000-000000000000",
        "GPU-00000000-0000-0000-0000-000000000001",
    ]
    assert found["devices"][1]["pci_bus_id"] == "0000:01:00.0"
    assert found["devices"][1]["free"] == found["devices"][1]["total"] == 1 << 30
    assert found["handle_type"] == "posix_fd"
    assert found["reason"].startswith("fabric handles do not work")


# Copies


def test_copies_of_more_than_a_buffer(driver, monkeypatch):
    monkeypatch.setattr(cuda_driver, "STAGING_BYTES", 1000)
    data = np.random.default_rng(0).bytes(10_001)
    with allocate([0], 20_000, driver=driver) as memory:
        address = memory.segments[0].address + 3
        memory.write(address, data)
        assert memory.read(address, len(data)) == data
        assert memory.read(address, 0) == b""
        memory.write(address, b"")


def test_copies_outside_of_the_memory(driver):
    with allocate([0, 1], GRANULARITY, driver=driver) as memory:
        last = memory.segments[0].address + GRANULARITY - 1
        memory.write(last, b"x")
        for address, size in [(last, 2), (last + 1, 1), (memory.segments[0].address - 1, 2)]:
            if any(s.address == last + 1 for s in memory.segments) and size == 1:
                continue
            with pytest.raises(ValueError, match=f"{size} bytes at {address:#x} are not in"):
                memory.read(address, size)


def test_copies_from_several_threads(driver):
    with allocate([0], 64_000, driver=driver) as memory:
        address, wrong = memory.segments[0].address, []

        def work(index):
            data = bytes([index]) * 1000
            for _ in range(50):
                memory.write(address + 1000 * index, data)
                if memory.read(address + 1000 * index, 1000) != data:
                    wrong.append(index)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


# JAX's devices and arrays


class JaxDevice:
    """As JAX describes a GPU; its arrays lie on `ordinal`."""

    platform = "gpu"

    def __init__(self, ordinal):
        self.local_hardware_id = ordinal


MISMATCH = r"lie on GPU 0 .*local_hardware_id is 1.*VISIBLE"


@pytest.fixture
def arrays_at(monkeypatch):
    """Puts every array that JAX places at an address."""

    def put(address):
        probe = SimpleNamespace(unsafe_buffer_pointer=lambda: address)
        monkeypatch.setattr(jax, "device_put", lambda *_: probe)

    return put


def test_devices_of_jax_are_checked_against_their_arrays(driver, arrays_at):
    driver.cuInit(0)
    driver.cuDevicePrimaryCtxRetain(0)  # as XLA has it
    arrays_at(77)
    for actual in (1, None):  # None: the driver does not tell, and that is no reason to refuse
        driver.pointers[77] = actual
        allocate(Devices.of([JaxDevice(1)], driver), 1).close()
    driver.pointers[77] = 0
    with pytest.raises(CudaError, match=MISMATCH):
        Devices.of([JaxDevice(1)], driver)
    driver.cuDevicePrimaryCtxRelease(0)


@pytest.mark.parametrize("actual", [0, 1])
def test_devices_of_jax_are_checked_against_arrays_in_mapped_memory(driver, arrays_at, actual):
    with allocate([actual], SIZE, driver=driver) as memory:
        arrays_at(memory.segments[0].address + 1234)
        if actual == 1:
            Devices.of([JaxDevice(1)], driver).close()
        else:
            with pytest.raises(CudaError, match=MISMATCH):
                Devices.of([JaxDevice(1)], driver)


def test_arrays_of_which_the_driver_knows_nothing_are_accepted(driver, arrays_at):
    arrays_at(77)
    Devices.of([JaxDevice(1)], driver).close()


# The model, and the real thing


def test_the_model_knows_what_the_bindings_have():
    """Names, and numbers of arguments, of each function that the module may call."""
    bindings = pytest.importorskip("cuda.bindings.driver")
    names = [name[1:] for name in vars(FakeDriver) if re.match("_cu[A-Z]", name)]
    assert len(names) > 30
    for name in names:
        signature = getattr(bindings, name).__doc__.split("\n")[0]
        inside = signature[signature.index("(") + 1 : signature.rindex(")")]
        count = sum(1 for each in inside.split(",") if each)
        code = getattr(FakeDriver, f"_{name}").__code__
        assert count == code.co_argcount - 1, signature
    for kind in ("CUresult", "CUmemAllocationHandleType", "CUpointer_attribute"):
        for member in getattr(FakeDriver(), kind):
            assert int(getattr(getattr(bindings, kind), member.name)) == int(member)


def gpus(number):
    found = int(Driver().call("cuDeviceGetCount"))
    if found < number:
        pytest.skip(f"{found} GPUs of {number}")
    return list(range(number))


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2])
def test_gpu_memory(number):
    ordinals = gpus(number)
    driver = Driver()
    with contextlib.closing(Devices(ordinals, driver)) as devices:
        before = [devices.memory_info(ordinal)[0] for ordinal in ordinals]
        data = np.random.default_rng(0).bytes(9_000_001)
        devices.retain()
        with allocate(devices, 10_000_000, fabric=True) as memory:
            print(memory.handle_type, memory.reason)
            for segment in memory.segments:
                assert memory.read(segment.address, 10_000_000) == bytes(10_000_000)
                for ordinal in ordinals:
                    devices.write(ordinal, segment.address + ordinal, data)
                    for reader in ordinals:
                        assert devices.read(reader, segment.address + ordinal, len(data)) == data
        assert [devices.memory_info(ordinal)[0] for ordinal in ordinals] == before


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2])
def test_gpu_two_processes(number):
    ordinals = gpus(number)
    swap_with_another_process(None, "real", ordinals[0], ordinals[-1])


@pytest.mark.gpu
def test_gpu_out_of_memory():
    with pytest.raises(OutOfCudaMemoryError, match="bytes are wanted"):
        allocate([0], 1 << 45)
