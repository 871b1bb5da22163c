"""Builds one wheel for each supported Python that is found, into dist/.

    python3 scripts/build_wheels.py [VERSION...]    # such as 3.12; all of them by default

Each build is isolated: pip makes an environment with the pinned jaxlib, CMake and Ninja for it.
Every wheel is then looked into: extension for that Python, stub, py.typed, models.
Standard library only.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

import setup_env

DIST = setup_env.ROOT / "dist"


def build(interpreter: setup_env.Interpreter, work: pathlib.Path) -> pathlib.Path:
    """The wheel for one interpreter."""
    venv, wheels = work / "venv", work / "wheels"
    tag = "cp{}{}".format(*interpreter.version)
    subprocess.run([interpreter.executable, "-m", "venv", str(venv)], check=True)
    pip = [setup_env.python_of(venv), "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--wheel-dir", str(wheels), "."]
    what = f"{tag}: building a wheel with {interpreter}"
    setup_env.run(command, what, env=setup_env.build_environment(venv))
    (wheel,) = wheels.glob("*.whl")
    return pathlib.Path(shutil.move(wheel, DIST / wheel.name))


def missing_parts(wheel: pathlib.Path) -> list[str]:
    """What a user would miss in it."""
    names = zipfile.ZipFile(wheel).namelist()
    tag = wheel.name.split("-")[2].replace("cp", "cpython-")
    wanted = {
        f"the extension for {tag}": f"jax_iser/_iser.{tag}-",
        "its stub": "jax_iser/_iser.pyi",
        "the type marker": "jax_iser/py.typed",
        "the models": "jax_iser/models/__init__.py",
        "the command": ".dist-info/entry_points.txt",
        "the license": ".dist-info/licenses/LICENSE",
    }
    for path in sorted((setup_env.ROOT / "models").rglob("*.safetensors")):
        relative = path.relative_to(setup_env.ROOT)
        wanted[f"the checkpoint {relative}"] = f"jax_iser/{relative}"
    return [what for what, part in wanted.items() if not any(part in name for name in names)]


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    found = {"{}.{}".format(*each.version): each for each in setup_env.interpreters()}
    versions = parser.parse_args().versions or list(found)
    if unknown := set(versions) - set(found):
        parser.error(f"no usable Python {', '.join(unknown)}; found {', '.join(found)}")
    DIST.mkdir(exist_ok=True)
    for version in versions:
        with tempfile.TemporaryDirectory() as work:
            wheel = build(found[version], pathlib.Path(work))
        if missing := missing_parts(wheel):
            sys.exit(f"{wheel.name} lacks {', '.join(missing)}")
        print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)", flush=True)


if __name__ == "__main__":
    main()
