"""What benchmarks record of a run: its command, date, device, versions and a commit that exists."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORT = "benchmarks/_report.py"
GOOD = "0123abcdef"


def run(*command, cwd=ROOT, **variables):
    left_out = ("ISER_COMMIT", "GPUS", "PYTHONSAFEPATH")
    env = {key: value for key, value in os.environ.items() if key not in left_out}
    env |= {name: str(value) for name, value in variables.items()}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100)


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    done = run("git", *identity, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A checkout of its own, with the writer and a source."""
    for name in (REPORT, "benchmarks/results/old.json", "source.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    shutil.copy(ROOT / REPORT, tmp_path / REPORT)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def check(folder, *words, **variables):
    return run(sys.executable, REPORT, "--check", *words, cwd=folder, **variables)


def test_a_clean_checkout_names_its_commit(checkout):
    done = check(checkout)
    assert done.returncode == 0, done.stderr
    assert git(checkout, "rev-parse", "HEAD").startswith(done.stdout.strip())


def test_changed_results_leave_the_sources_clean(checkout):
    (checkout / "benchmarks/results/old.json").write_text("2\n")
    assert check(checkout).returncode == 0


def test_changed_sources_are_refused_or_marked(checkout):
    (checkout / "source.h").write_text("2\n")
    commit = git(checkout, "rev-parse", "--short=10", "HEAD")
    refused = check(checkout)
    assert refused.returncode == 2
    assert f"they differ from commit {commit}" in refused.stderr
    assert "--allow-dirty" in refused.stderr
    assert check(checkout, "--allow-dirty").stdout.strip() == f"{commit}-dirty"


def test_no_checkout_needs_the_commit_by_name(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(ROOT / REPORT, tmp_path / REPORT)
    refused = check(tmp_path, GIT_CEILING_DIRECTORIES=tmp_path.parent)
    assert refused.returncode == 2
    assert "set ISER_COMMIT" in refused.stderr
    assert check(tmp_path, ISER_COMMIT=GOOD).stdout.strip() == GOOD
    wrong = check(tmp_path, ISER_COMMIT="newest")
    assert wrong.returncode == 2
    assert "ISER_COMMIT='newest' is no commit" in wrong.stderr


def test_python_benchmarks_refuse_before_they_run():
    """A benchmark that would run for minutes has to say at once that it may not record."""
    words = (sys.executable, "benchmarks/bench_planner.py", "--json", "-", "--repeats", "1000000")
    done = run(*words, ISER_COMMIT=f"{GOOD}-dirty", PYTHONPATH=ROOT)
    assert done.returncode == 2
    assert "--allow-dirty" in done.stderr
    assert done.stdout == ""


def test_python_benchmarks_record_their_run(tmp_path):
    program = tmp_path / "bench.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        "import _report\n"
        "_report.write(_report.parser('x').parse_args(), {'rows': [1]})\n"
    )
    done = run(sys.executable, program, "--json", "-", ISER_COMMIT=GOOD)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["commit"] == GOOD
    assert document["command"].endswith("bench.py --json -")
    assert document["date"][:2] == "20"
    assert document["device"].endswith("cores")
    assert document["versions"]["numpy"]
    assert document["rows"] == [1]


@pytest.mark.parametrize("missing", ["command", "date", "device", "versions", "commit"])
def test_a_document_that_lacks_one_is_not_written(missing, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import _report

    whole = dict.fromkeys(_report.REQUIRED, "x")
    assert _report.checked(whole) == whole
    with pytest.raises(ValueError, match=f"a result without {missing}:"):
        _report.checked(whole | {missing: None})


def executable(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def gpu_machine(tmp_path):
    """Programs that stand in for the CUDA ones and for nvidia-smi; the variables that use them."""
    tests = ("test_plan", "test_replication", "test_fused_moe")
    for name in tests:
        executable(tmp_path / "cuda" / name, f"touch {tmp_path}/{name}.ran")
    rows = '{"bench": "plan", "us": 1.5}\\n{"clocks": 2}\\n'
    executable(tmp_path / "cuda/bench_plan", f"printf '{rows}'")
    executable(
        tmp_path / "bin/nvidia-smi", 'case $1 in -L) echo "GPU 0";; *) echo "Fake, 1.2";; esac'
    )
    return {
        "ISER_CUDA_BUILD": tmp_path / "cuda",
        "ISER_SKIP_BUILD": 1,
        "BENCHMARKS": "plan",
        "RAW": tmp_path / "raw",
        "PYTHON": sys.executable,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }


def test_gpu_benchmarks_record_their_run(gpu_machine, tmp_path):
    done = run("scripts/bench_gpu.sh", tmp_path / "out", ISER_COMMIT=GOOD, **gpu_machine)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "test_plan.ran").exists()
    document = json.loads((tmp_path / "out/cuda_plan.json").read_text())
    assert document["commit"] == GOOD
    assert document["command"] == f"{tmp_path}/cuda/bench_plan --gpus 1"
    assert document["device"] == "1x Fake"
    assert document["versions"]["driver"] == "1.2"
    assert document["date"]
    assert document["plan"] == [{"us": 1.5}]


def test_gpu_benchmarks_refuse_dirty_sources_before_they_run(gpu_machine, tmp_path):
    dirty = {"ISER_COMMIT": f"{GOOD}-dirty"} | gpu_machine
    refused = run("scripts/bench_gpu.sh", tmp_path / "out", **dirty)
    assert refused.returncode != 0
    assert "--allow-dirty" in refused.stderr
    assert not (tmp_path / "test_plan.ran").exists()
    marked = run("scripts/bench_gpu.sh", tmp_path / "out", ALLOW_DIRTY=1, **dirty)
    assert marked.returncode == 0, marked.stderr
    assert json.loads((tmp_path / "out/cuda_plan.json").read_text())["commit"] == f"{GOOD}-dirty"


def test_lines_are_no_gpu_document_without_a_gpu(tmp_path):
    (tmp_path / "lines.jsonl").write_text("{}\n")
    words = (sys.executable, ROOT / REPORT, "out.json", "--command", "x", "lines.jsonl")
    executable(tmp_path / "bin/nvidia-smi", "exit 9")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = run(*words, cwd=tmp_path, ISER_COMMIT=GOOD, PATH=path)
    assert done.returncode == 2
    assert "nvidia-smi shows no GPU" in done.stderr
    assert not (tmp_path / "out.json").exists()
