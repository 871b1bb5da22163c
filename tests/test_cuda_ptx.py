"""The instructions under each fabric's leaf, read from PTX; needs nvcc and no GPU.

The multicast leaf is compiled and looked at, never launched: PTX knows its store since version 9.1,
so older toolkits emit it but cannot assemble it.
"""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = "ffi/cuda/replication.cu"
NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc")
UNICAST_STORE = "cp.async.bulk.global.shared::cta.bulk_group"
MULTICAST_STORE = "multimem.cp.async.bulk.global.shared::cta.bulk_group"
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is neither on PATH nor in CUDACXX")


def nvcc(*arguments: str) -> subprocess.CompletedProcess:
    command = [NVCC, "-std=c++17", "-O3", "-I.", *arguments, SOURCE]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def nvcc_version() -> tuple[int, int]:
    text = subprocess.run([NVCC, "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = re.search(r"release (\d+)\.(\d+)", text).groups()
    return int(major), int(minor)


def entries(ptx: str) -> dict[str, str]:
    """Name of a kernel -> its body."""
    parts = re.split(r"^(?:\.visible )?\.entry (\w+)", ptx, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def entry_of(ptx: str, fabric: str) -> str:
    (body,) = (body for name, body in entries(ptx).items() if fabric in name)
    return body


def instructions(body: str, name: str) -> int:
    return len(re.findall(rf"^\s*{re.escape(name)}\b", body, flags=re.MULTILINE))


@pytest.fixture(scope="module")
def multicast_ptx(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("ptx") / "replication.ptx"
    done = nvcc("-DISER_MULTICAST_PTX", "-arch=compute_90a", "-ptx", "-o", str(path))
    if nvcc_version() >= (13, 1):
        assert done.returncode == 0, done.stderr
    else:  # nvcc leaves the text behind when its assembler does not know the one instruction
        errors = [line for line in done.stderr.splitlines() if "; error" in line]
        assert errors or done.returncode == 0, done.stderr
        assert all("multimem" in line or "'.bulk'" in line for line in errors), done.stderr
    return path.read_text()


@needs_nvcc
def test_every_toolkit_assembles_the_kernels_that_run(tmp_path):
    target = tmp_path / "replication.cubin"
    done = nvcc("-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-o", str(target))
    assert done.returncode == 0, done.stderr
    assert target.stat().st_size > 0


@needs_nvcc
def test_the_unicast_leaf_stores_by_the_bulk_copy_engine(multicast_ptx):
    body = entry_of(multicast_ptx, "UnicastFabric")
    assert instructions(body, LOAD) > 0
    assert instructions(body, UNICAST_STORE) > 0
    assert "multimem" not in body


@needs_nvcc
def test_the_multicast_leaf_stores_once_for_all_members(multicast_ptx):
    body = entry_of(multicast_ptx, "MulticastFabric")
    assert instructions(body, LOAD) > 0
    assert instructions(body, MULTICAST_STORE) == 1
    assert instructions(body, UNICAST_STORE) == 0


@needs_nvcc
def test_ready_is_released_at_system_scope_behind_the_stores(multicast_ptx):
    body = entry_of(multicast_ptx, "UnicastFabric")
    written = body.rfind("cp.async.bulk.wait_group 0")
    proxy = body.find("fence.proxy.async", written)
    # The CTA that counts last has acquired what the others released; its own release covers it all.
    counted = body.find("atom.acq_rel.gpu.global.add.u32", proxy)
    assert -1 < written < proxy < counted < body.rfind("red.release.sys.global.add.u32")
