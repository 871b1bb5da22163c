"""The `jax-iser` command itself, `generate` and `doctor`."""

import io
import json
import os
import subprocess
import sys

import pytest
from flax import nnx

from jax_iser.cli import COMMANDS, _probes, main
from jax_iser.models import ModelConfig, MoELM, from_pretrained, generate, save

TINY = ModelConfig(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=8,
    num_experts=4,
    top_k=2,
    shared_intermediate_size=8,
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert f"usage: jax-iser {command}" in out
    assert f"\nexample:\n  jax-iser {command} " in out


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["--nonsense"]])
def test_bad_usage_is_one_line(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_reader_that_leaves_is_no_error_on_the_screen(tmp_path):
    """`jax-iser plan ... | head -1`: no traceback."""
    (tmp_path / "counts.csv").write_text("9,1,1,1\n" * 4)
    command = [sys.executable, "-m", "jax_iser.cli", "plan", "counts.csv"]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 1
    assert done.stderr == ""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save(MoELM(TINY, method="portable", rngs=nnx.Rngs(1)), path)
    return path


def test_generate_continues_the_prompt_as_the_model_does(model_dir, capsysbinary):
    argv = ["generate", "--model", str(model_dir), "--prompt", "ab", "--tokens", "12"]
    assert main([*argv, "--temperature", "0.7", "--seed", "5"]) == 0
    out = capsysbinary.readouterr().out
    added = generate(from_pretrained(model_dir), b"ab", 12, 0.7, 5)
    assert len(added) > 2
    assert out.decode() == (b"ab" + added).decode(errors="replace") + "\n"


def test_generate_reads_the_prompt_from_standard_input(model_dir, capsys, monkeypatch):
    argv = ["generate", "--model", str(model_dir), "--tokens", "3", "--temperature", "0"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é".encode())))
    assert main([*argv, "--prompt", "-"]) == 0
    piped = capsys.readouterr().out
    assert main([*argv, "--prompt", "é"]) == 0
    assert capsys.readouterr().out == piped
    assert piped.startswith("é")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--prompt", "a\0b"], "zero byte"),
        (["--prompt", "a", "--tokens", "0"], "0 is below 1"),
        (["--prompt", "a", "--temperature", "-1"], "-1 is below 0"),
        (["--prompt", "a", "--temperature", "nan"], "nan"),
        (["--prompt", "a", "--model", "/nowhere"], "/nowhere"),
        ([], "--prompt"),
    ],
)
def test_generate_usage_errors(model_dir, capsys, options, word):
    with pytest.raises(SystemExit) as stop:
        sys.exit(main(["generate", "--model", str(model_dir), *options]))
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert len(err.splitlines()) == 1
    assert word in err


def test_doctor_finds_the_cpu_methods_working(capsys):
    assert main(["doctor", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["ok"] is True
    assert {"python", "jax", "jaxlib", "flax", "numpy"} <= set(result["versions"])
    assert result["devices"]
    assert result["methods"]["fused on cpu"]["works"] is True
    assert result["methods"]["reference"]["works"] is True
    assert result["fabrics"]["unicast on cpu"]["works"] is True
    assert result["fabrics"]["multicast"]["works"] is False
    for found in (*result["methods"].values(), *result["fabrics"].values()):
        assert found["why"]
        assert found["why"] in err


def test_doctor_says_what_failed_and_exits_with_1(capsys, monkeypatch):
    def broken(backend):
        raise OSError("no memory left")

    monkeypatch.setattr(_probes, "_run_skewed_layer", broken)
    assert main(["doctor", "--json", "-"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is False
    assert result["methods"]["fused on cpu"] == {"works": False, "why": "OSError: no memory left"}
    assert result["fabrics"]["unicast on cpu"]["works"] is False
    assert result["methods"]["reference"]["works"] is True
