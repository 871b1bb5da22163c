"""The Python of README.md and docs/using.md runs, in order, each in a process of its own."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from jax_iser.cli import main

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run_snippets(path, folder):
    """Standard output of the file's Python blocks, joined to one program."""
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-W", "error:::jax_iser", "-c", "\n".join(blocks)],
        cwd=folder,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme(tmp_path):
    before, after = map(float, run_snippets(ROOT / "README.md", tmp_path).split())
    assert before > 1.4
    assert after < 1.1


def test_using(tmp_path, monkeypatch, capsys):
    out = run_snippets(ROOT / "docs" / "using.md", tmp_path)
    before, after = map(float, re.search(r"R (\S+) to (\S+)", out).groups())
    assert before > 1.4
    assert after < 1.1
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "using.md").read_text()
    for command in re.findall(r"^    jax-iser (.*)$", text, re.MULTILINE):
        assert main(command.split()) == 0
    shown = capsys.readouterr().out
    assert f"R, max over mean: {before:.2f}" in shown


@pytest.mark.parametrize("name", ["README.md", "docs/using.md"])
def test_links_lead_somewhere(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
