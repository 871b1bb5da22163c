"""No program of ours makes a multicast object: on shared hosts one can take GPUs out of service."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUFFIXES = {".cu", ".cuh", ".cc", ".h", ".py", ".sh", ".cmake", ".txt", ".toml"}
FOLDERS = ("ffi", "jax_iser", "models", "benchmarks", "tests", "scripts")
SWITCH = "NCCL_NVLS_ENABLE"

FORBIDDEN = {
    "calls the driver's multicast functions": r"(?i)cu_?multicast",
    "launches the multicast kernel": r"MulticastFabric>\s*(?:<<<|,)",
    "takes torch's multicast memory": r"multimem_|multicast_ptr|symm_mem|symmetric_memory",
    "lets NCCL make multicast objects": rf"{SWITCH}[\"'\])]*\s*[=,:]\s*[\"']?(?!0)\w",
}
STARTS_NCCL = r"ncclCommInit|init_process_group\("


def sources(root):
    """Files of the project's programs, and those that build and start them."""
    files = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*"))]
    files += [
        path for path in sorted(root.iterdir()) if path.name in ("Makefile", "CMakeLists.txt")
    ]
    for path in files:
        is_built = "results" in path.parts or "__pycache__" in path.parts
        if path.is_file() and (path.suffix in SUFFIXES or path.name == "Makefile") and not is_built:
            yield path


def faults(root):
    """What is wrong in which file of a tree, this file left out."""
    found = []
    for path in sources(root):
        if path.name == pathlib.Path(__file__).name:
            continue
        text = path.read_text()
        found += [(path, what) for what, how in FORBIDDEN.items() if re.search(how, text)]
        if re.search(STARTS_NCCL, text) and not re.search(rf"{SWITCH}\b\W+0", text):
            found.append((path, f"starts NCCL and does not set {SWITCH}=0 itself"))
    return [(str(path.relative_to(root)), what) for path, what in found]


def test_nothing_makes_a_multicast_object_or_launches_its_kernel():
    names = {path.relative_to(ROOT).parts[0] for path in sources(ROOT)}
    assert names >= {"ffi", "jax_iser", "benchmarks", "tests", "scripts", "Makefile"}
    assert not faults(ROOT)


PLANTED = {
    "ffi/cuda/fabric.cu": "check(cuMulticastCreate(&handle, &properties));",
    "ffi/cuda/launch.cu": "replication_kernel<MulticastFabric><<<grid, block>>>(launch);",
    "benchmarks/cuda/bench.cu": "cudaLaunchKernelEx(&config, kernel<MulticastFabric>, launch);",
    "jax_iser/domain/cuda.py": "driver.cuMulticastAddDevice(handle, device)",
    "tests/gpu/program.py": "memory = torch.ops.symm_mem.multimem_all_reduce_(x)",
    "scripts/run.sh": "export NCCL_NVLS_ENABLE=1",
    "tests/conftest.py": 'os.environ["NCCL_NVLS_ENABLE"] = "1"',
    "benchmarks/setenv.h": 'setenv("NCCL_NVLS_ENABLE", "2", 1);',
    "benchmarks/start.py": 'dist.init_process_group("nccl")',
    "benchmarks/start.h": "ncclCommInitAll(comms, 2, nullptr);",
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_scan_sees_it(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(f"{PLANTED[name]}\n")
    assert [where for where, _ in faults(tmp_path)] == [name]
    path.write_text(f'os.environ["{SWITCH}"] = "0"\nsetenv("{SWITCH}", "0", 1);\n')
    assert not faults(tmp_path)
