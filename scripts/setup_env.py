"""Makes a virtual environment at the root of the checkout that holds the package and its tools.

    python3 scripts/setup_env.py oldest    # .venv: oldest usable Python, the oldest supported jax
    python3 scripts/setup_env.py newest    # .venv-newest: newest usable Python, its newest jax

Nothing is done where the stamp in the environment says that neither the requirements nor the
sources have changed; changed sources rebuild the package alone. Standard library only.
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Any, NamedTuple, NoReturn

if sys.version_info < (3, 11):
    sys.exit(
        "jax_iser needs Python 3.11 to 3.13, but this is Python %d.%d; name another one: "
        "make PYTHON=python3.12 setup" % sys.version_info[:2]
    )

import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAMP = ".jax-iser.json"
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
DIRECTORIES = {"oldest": ".venv", "newest": ".venv-newest"}
SOURCES = (
    *("CMakeLists.txt", "targets.bzl", "scripts/targets.py", "pyproject.toml", "README.md"),
    *("LICENSE", "ffi", "jax_iser", "models"),
)
NOT_SOURCES = {".so", ".pyc", ".pyi"}

PROBE = """
import importlib.util, json, os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
print(json.dumps({
    "executable": sys.executable, "version": sys.version_info[:3],
    "header": os.path.exists(header), "pip": importlib.util.find_spec("ensurepip") is not None,
    "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED"))}))
"""


class Interpreter(NamedTuple):
    """A Python that can hold an environment: it makes venvs and has its C headers."""

    executable: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"Python {'.'.join(map(str, self.version))}"


def say(text: str) -> None:
    print(f"[setup] {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    sys.exit(f"[setup] {text}")


def run(command: list[str], what: str, **kwargs: Any) -> None:
    """Runs a quiet command behind one line of progress; stops with its output where it fails."""
    say(f"{what} ...")
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **kwargs
    )
    if done.returncode:
        sys.stderr.write(done.stdout)
        fail(f"{what}: failed with exit code {done.returncode}: {' '.join(command)}")
    say(f"{what}: {time.monotonic() - start:.0f} s")


def probe(executable: str) -> Interpreter | str:
    """The interpreter, or why it cannot be used."""
    try:
        done = subprocess.run(
            [executable, "-I", "-c", PROBE], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return "it does not run"
    facts = json.loads(done.stdout)
    version = tuple(facts["version"])
    if not OLDEST_PYTHON <= version[:2] <= NEWEST_PYTHON:
        return f"version {version[0]}.{version[1]} is not supported"
    if facts["free_threaded"]:
        return "free-threaded builds are not supported"
    if not facts["header"]:
        return f"Python.h is missing (Debian: apt install python{version[0]}.{version[1]}-dev)"
    if not facts["pip"]:
        return f"ensurepip is missing (Debian: apt install python{version[0]}.{version[1]}-venv)"
    return Interpreter(facts["executable"], version)


def candidates() -> list[str]:
    """Executables worth a look: this one, those on PATH, those of pyenv."""
    names = [f"python3.{minor}" for minor in range(OLDEST_PYTHON[1], NEWEST_PYTHON[1] + 1)]
    folders = os.environ.get("PATH", "").split(os.pathsep)
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    found = [sys.executable]
    found += [os.path.join(folder, name) for name in names for folder in folders]
    found += [str(path) for name in names for path in sorted(pyenv.glob(f"versions/*/bin/{name}"))]
    return [path for path in dict.fromkeys(found) if os.access(path, os.X_OK)]


def interpreters() -> list[Interpreter]:
    """Every usable interpreter, by minor version; of one version the first that was found."""
    answers = {path: probe(path) for path in candidates()}
    usable = [answer for answer in answers.values() if isinstance(answer, Interpreter)]
    if not usable:
        reasons = "\n".join(f"  {path}: {why}" for path, why in answers.items())
        fail(f"no usable Python 3.11 to 3.13 found:\n{reasons}")
    by_minor: dict[tuple[int, ...], Interpreter] = {}
    for each in usable:
        by_minor.setdefault(each.version[:2], each)
    return [by_minor[minor] for minor in sorted(by_minor)]


def choose(which: str) -> Interpreter:
    """The oldest or the newest usable interpreter; ISER_PYTHON or ISER_PYTHON_NEWEST overrides."""
    variable = {"oldest": "ISER_PYTHON", "newest": "ISER_PYTHON_NEWEST"}[which]
    if asked := os.environ.get(variable):
        answer = probe(shutil.which(asked) or asked)
        if isinstance(answer, str):
            fail(f"{variable}={asked} cannot be used: {answer}")
        return answer
    return interpreters()[0 if which == "oldest" else -1]


def python_of(venv: pathlib.Path) -> str:
    return str(venv / "bin" / "python")


def make_venv(venv: pathlib.Path, which: str) -> None:
    """Keeps an environment whose interpreter works, and makes a new one in any other case."""
    if venv.exists() and isinstance(probe(python_of(venv)), Interpreter):
        return
    interpreter = choose(which)
    run(
        [interpreter.executable, "-m", "venv", "--clear", str(venv)],
        f"{venv.name}: making an environment with {interpreter}",
    )


def requirements(project: dict[str, Any], which: str) -> list[str]:
    """What the environment needs; the newest one takes jax unpinned."""
    wanted = [*project["build-system"]["requires"], "cmake>=3.21", "ninja>=1.10"]
    if which == "newest":
        wanted = [each for each in wanted if "==" not in each]
    extras = project["project"]["optional-dependencies"]
    wanted += [*project["project"]["dependencies"], *extras["test"], *extras["train"]]
    if which == "oldest":
        wanted += extras["lint"]
    if os.environ.get("ISER_CUDA") == "1":
        wanted += extras["cuda"]
    return list(dict.fromkeys(wanted))


def source_files() -> list[pathlib.Path]:
    """The files that go into the package; links are left out (jax_iser/models is one)."""
    files: list[pathlib.Path] = []
    for name in SOURCES:
        top = ROOT / name
        files += [top] if top.is_file() else []
        for folder, folders, names in os.walk(top):
            folders[:] = sorted(each for each in folders if each != "__pycache__")
            files += [pathlib.Path(folder, each) for each in sorted(names)]
    return [path for path in files if path.suffix not in NOT_SOURCES]


def digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode() if isinstance(part, str) else part)
        total.update(b"\0")
    return total.hexdigest()[:16]


def wanted_stamp(venv: pathlib.Path, needs: list[str]) -> dict[str, str]:
    config = (venv / "pyvenv.cfg").read_text() if (venv / "pyvenv.cfg").exists() else ""
    version = re.findall(r"^version *= *(.*)$", config, re.MULTILINE)
    environment = digest(*needs, *version)
    files = source_files()
    package = digest(
        environment,
        os.environ.get("ISER_CUDA", ""),
        *(str(path.relative_to(ROOT)) for path in files),
        *(path.read_bytes() for path in files),
    )
    return {"environment": environment, "package": package}


def read_stamp(venv: pathlib.Path) -> dict[str, str]:
    try:
        return dict(json.loads((venv / STAMP).read_text()))
    except (OSError, ValueError):
        return {}


def write_stamp(venv: pathlib.Path, stamp: dict[str, str]) -> None:
    (venv / STAMP).write_text(json.dumps(stamp))


def install_requirements(venv: pathlib.Path, needs: list[str], which: str) -> None:
    pip = [python_of(venv), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if which == "newest":
        pip.append("--upgrade")
    what = "the oldest supported jax" if which == "oldest" else "the newest jax"
    run([*pip, *needs], f"{venv.name}: installing {what} and {len(needs)} requirements by pip")


def ffi_include() -> str:
    """XLA FFI headers of the pinned jaxlib, which lie in the oldest environment."""
    done = subprocess.run(
        [python_of(ROOT / DIRECTORIES["oldest"]), "-c", "import jax; print(jax.ffi.include_dir())"],
        capture_output=True,
        text=True,
        cwd="/",
    )
    if done.returncode:
        fail("the headers of the pinned jaxlib come from .venv; run `make setup` first")
    return done.stdout.strip()


def build_environment(venv: pathlib.Path) -> dict[str, str]:
    """Environment variables of a build: tools of the environment first, and a compiler that exists.

    Left alone, the build would take the compiler that the interpreter was built with.
    """
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    compiler = next((name for name in names if name and shutil.which(name.split()[0])), None)
    if compiler is None:
        fail("no C++ compiler found; install one (Debian: apt install g++) or name it in CXX")
    path = os.pathsep.join([str(venv / "bin"), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "CXX": compiler}


def install_package(venv: pathlib.Path) -> None:
    """Builds in build/<environment>, kept between calls, so that only what changed is compiled."""
    settings = {
        "build-dir": f"build/{venv.name.lstrip('.')}",
        "cmake.define.ISER_XLA_FFI_INCLUDE": ffi_include(),
    }
    command = [python_of(venv), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command += ["--no-build-isolation", "--no-deps", "--force-reinstall"]
    for key, value in settings.items():
        command += ["--config-settings", f"{key}={value}"]
    what = f"{venv.name}: building and installing jax_iser"
    run([*command, "."], what, env=build_environment(venv))


def setup(which: str) -> None:
    venv = ROOT / DIRECTORIES[which]
    needs = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text()), which)
    make_venv(venv, which)
    wanted, found = wanted_stamp(venv, needs), read_stamp(venv)
    if wanted == found:
        return
    if wanted["environment"] != found.get("environment"):
        install_requirements(venv, needs, which)
        write_stamp(venv, {"environment": wanted["environment"]})
    install_package(venv)
    write_stamp(venv, wanted)
    say(f"{venv.name} is ready")


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=list(DIRECTORIES), help="which of the two environments")
    setup(parser.parse_args().which)


if __name__ == "__main__":
    main()
