"""`jax-iser prefill`: its figures against what recorded routing and logits say themselves."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jax_iser import prefill as engine
from jax_iser.cli import _devices, main, prefill
from jax_iser.cli._output import UsageError
from jax_iser.experts.formats import float8_block128 as fp8
from jax_iser.models import ModelConfig, MoELM, bits_per_byte, from_pretrained, save
from jax_iser.reference.planner import plan_counts

TINY = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=24,
    num_experts=16,
    top_k=2,
    shared_intermediate_size=32,
)
IN_BLOCKS = dataclasses.replace(TINY, hidden_size=128, intermediate_size=128)
BUNDLE_BYTES = 3 * 32 * 24 * 4
EP, TOKENS = 8, 16
KEYS = {
    *("model", "ep", "slots", "tokens_per_rank", "bits_per_byte", "bitwise_equal"),
    *("imbalance_off_mean", "imbalance_on_mean", "busy_max_off_s", "busy_max_on_s"),
    *("copied_bytes", "tokens_per_s", "layers"),
}
LAYER_KEYS = {
    *("layer", "imbalance_off", "imbalance_on", "broadcasts", "remote_copies"),
    *("copied_bytes", "busy_max_off_s", "busy_max_on_s"),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    save(MoELM(TINY, method="portable", rngs=nnx.Rngs(3)), path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(bytes(33 + (i * i + 7 * i) % 90 for i in range(600)))
    return path


def arguments(model_dir, text, *options):
    return [
        *("prefill", "--model", str(model_dir), "--text", str(text)),
        *("--tokens-per-rank", str(TOKENS), "--repeats", "1", *map(str, options)),
    ]


@pytest.fixture(scope="module")
def run(model_dir, text, tmp_path_factory):
    """One run with everything: (result, trace, picture, model directory, text)."""
    folder = tmp_path_factory.mktemp("run")
    files = {name: folder / name for name in ("result.json", "trace.npz", "picture.png")}
    options = zip(("--json", "--record", "--plot"), files.values(), strict=True)
    assert main(arguments(model_dir, text, *(x for pair in options for x in pair))) == 0
    result = json.loads(files["result.json"].read_text())
    with np.load(files["trace.npz"], allow_pickle=False) as archive:
        trace = dict(archive)
    return result, trace, files["picture.png"]


def test_json_has_the_documented_keys(run):
    result = run[0]
    assert set(result) >= KEYS
    assert all(set(layer) == LAYER_KEYS for layer in result["layers"])
    assert [layer["layer"] for layer in result["layers"]] == [0, 1]
    assert set(result["tokens_per_s"]) == {"off", "on", "fb"}
    assert all(rate > 0 for rate in result["tokens_per_s"].values())
    assert result["model"] == "tiny"
    assert (result["ep"], result["slots"], result["tokens_per_rank"]) == (EP, 4, TOKENS)
    # 600 bytes and a separator hold four chunks of 128, with one target past the last.
    assert result["chunks"] == 4


def test_logits_are_equal_to_the_bit(run):
    result = run[0]
    assert result["bitwise_equal"] is True
    digests = result["logits_sha256"]
    assert digests["off"] == digests["on"]
    assert len(set(digests["off"])) == 4


def counts_of(trace):
    """`[chunks, layers, P, E]` from a recorded trace."""
    ids = trace["topk_ids"].astype(int)
    chunks = len(ids) // (EP * TOKENS)
    rank = trace["source_rank"].reshape(chunks, -1)
    ids = ids.reshape(chunks, EP * TOKENS, TINY.num_layers, TINY.top_k)
    counts = np.zeros((chunks, TINY.num_layers, EP, TINY.num_experts), int)
    for chunk in range(chunks):
        for layer in range(TINY.num_layers):
            np.add.at(counts[chunk, layer], (rank[chunk, :, None], ids[chunk, :, layer]), 1)
    return counts


def test_recorded_routing_gives_the_same_loads_and_plans(run):
    result, trace, _ = run
    assert trace["topk_ids"].dtype == np.uint8
    assert trace["topk_ids"].shape == (4 * EP * TOKENS, TINY.num_layers, TINY.top_k)
    assert trace["request_lengths"].tolist() == [TOKENS] * 4 * EP
    assert trace["num_experts"] == TINY.num_experts
    plans = [[plan_counts(c) for c in layers] for layers in counts_of(trace)]
    ratio = lambda load: load.max() / load.mean()  # noqa: E731
    for layer, row in enumerate(result["layers"]):
        mine = [plan[layer] for plan in plans]
        # The device computes each R in f32.
        near = {"rel": 1e-6}
        off = np.mean([ratio(plan.load_before) for plan in mine])
        assert row["imbalance_off"] == pytest.approx(off, **near)
        assert row["imbalance_on"] == pytest.approx(np.mean([ratio(p.load) for p in mine]), **near)
        assert row["broadcasts"] == sum(plan.num_broadcasts for plan in mine)
        assert row["copied_bytes"] == row["remote_copies"] * BUNDLE_BYTES
    assert result["imbalance_off_mean"] > 1.05 * result["imbalance_on_mean"]


def test_totals_sum_up_the_layers(run):
    result = run[0]
    for name in ("copied_bytes", "busy_max_off_s", "busy_max_on_s"):
        assert result[name] == pytest.approx(sum(layer[name] for layer in result["layers"]))
        assert result[name] > 0
    for arm in ("off", "on"):
        mean = np.mean([layer[f"imbalance_{arm}"] for layer in result["layers"]])
        assert result[f"imbalance_{arm}_mean"] == pytest.approx(mean)
    assert result["imbalance_fb_mean"] == 1


def test_bits_per_byte_are_those_of_the_model_on_one_device(run, model_dir, text):
    stream = np.frombuffer(b"\0" + text.read_bytes(), np.uint8)[: 4 * EP * TOKENS + 1]
    stream = stream.astype(np.int32)
    model = from_pretrained(model_dir)
    logits = nnx.jit(lambda m, t: m(t))(model, stream[:-1].reshape(-1, TOKENS))
    expected = float(bits_per_byte(logits, stream[1:].reshape(-1, TOKENS)))
    assert run[0]["bits_per_byte"] == pytest.approx(expected, rel=1e-4)  # f32 sums in other orders


def test_experts_in_fp8(text, tmp_path, capsys):
    """Quantised when they are read, and as a model stores them that has been: the same bits."""
    save(MoELM(IN_BLOCKS, method="portable", rngs=nnx.Rngs(3)), tmp_path / "plain")
    save(from_pretrained(tmp_path / "plain", weight_dtype=fp8.NAME), tmp_path / "planes")
    results = []
    for name, options in (("plain", ("--weight-dtype", fp8.NAME)), ("planes", ())):
        options = ("--chunks", 2, "--arms", "off,on", "--json", "-", *options)
        assert main(arguments(tmp_path / name, text, *options)) == 0
        out, err = capsys.readouterr()
        assert f"experts in {fp8.NAME}" in err
        results.append(json.loads(out))
    for result in results:
        assert result["bitwise_equal"] is True
        assert result["weight_dtype"] == fp8.NAME
        copies = sum(layer["remote_copies"] for layer in result["layers"])
        assert copies > 0
        assert result["copied_bytes"] == copies * 3 * fp8.plane_bytes(128, 128)
    assert results[0]["logits_sha256"] == results[1]["logits_sha256"]


def test_picture_is_a_png(run):
    data = run[2].read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def test_json_on_standard_output_is_pure(model_dir, text, capsys):
    assert main(arguments(model_dir, text, "--chunks", 1, "--arms", "on,off", "--json", "-")) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["arms"] == ["off", "on"]
    assert result["tokens_per_s"]["fb"] is None
    assert "R off" in err
    assert "busy" in err


@pytest.mark.parametrize(("arms", "missing"), [("off", "on"), ("on", "off")])
def test_one_arm_leaves_the_other_null(model_dir, text, capsys, arms, missing):
    assert main(arguments(model_dir, text, "--chunks", 1, "--arms", arms, "--json", "-")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bitwise_equal"] is None
    assert result[f"busy_max_{missing}_s"] is None
    assert result[f"busy_max_{arms}_s"] > 0
    assert result["imbalance_off_mean"] >= 1
    assert (result["imbalance_on_mean"] is None) == (arms == "off")


def test_outputs_of_forced_routing_are_not_reported(model_dir, text, capsys):
    assert main(arguments(model_dir, text, "--chunks", 1, "--arms", "fb", "--json", "-")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bits_per_byte"] is None
    assert result["logits_sha256"] == {}
    assert result["imbalance_off_mean"] is None
    assert result["imbalance_fb_mean"] == 1


def test_reference_has_the_plans_and_no_busy_time(run, model_dir, text, capsys):
    options = ("--method", "reference", "--arms", "off,on", "--json", "-")
    assert main(arguments(model_dir, text, *options)) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["busy_max_off_s"] is None
    assert result["layers"][0]["busy_max_on_s"] is None
    assert result["bits_per_byte"] == pytest.approx(run[0]["bits_per_byte"], rel=1e-4)
    # The first layer routes what no expert has touched: the same in both methods.
    for name in ("imbalance_off", "imbalance_on", "broadcasts", "remote_copies"):
        assert result["layers"][0][name] == run[0]["layers"][0][name]


def test_ranks_that_share_devices_see_the_same_loads(run, model_dir, text, capsys):
    assert main(arguments(model_dir, text, "--ranks-per-device", 4, "--json", "-")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bitwise_equal"] is True
    assert result["layers"][0]["imbalance_off"] == run[0]["layers"][0]["imbalance_off"]


def test_times_of_whole_calls_as_gpus_have_them(run, model_dir, text, capsys, monkeypatch):
    """On CPUs, whose Domains keep the same moments."""
    monkeypatch.setattr(engine, "_clock_of", engine._CallClock)
    options = ("--ranks-per-device", 4, "--chunks", 2, "--repeats", 2, "--json", "-")
    assert main(arguments(model_dir, text, *options)) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (run[0]["seconds_of"], result["seconds_of"]) == ("tiles", "call")
    assert result["platform"] == "cpu"
    seconds = 2 * TINY.num_layers * result["tokens_per_s"]["on"] ** -1 * EP * TOKENS
    assert 0 < result["busy_max_on_s"] < seconds
    assert 0 < result["layers"][1]["busy_max_off_s"] < result["busy_max_off_s"]
    assert "slowest GPU's layer time" in err
    assert "layer off" in err


def test_ranks_are_shared_out_over_the_gpus(monkeypatch):
    for num_gpus, ep, wanted in ((0, 8, 1), (1, 8, 8), (2, 8, 4), (3, 8, 4), (16, 8, 1)):
        monkeypatch.setattr(_devices, "count_gpus", lambda *_, n=num_gpus: n)
        args = SimpleNamespace(
            coordinator=None, platform="auto", method="fused", ep=ep, ranks_per_device=None
        )
        prefill._choose_devices(args)
        assert args.ranks_per_device == wanted
        assert args.platform == ("gpu" if num_gpus else "cpu")


def test_a_changed_bit_is_found_and_fails(model_dir, text, capsys, monkeypatch):
    honest = engine._Runner.run

    def tampered(self, arm, tokens):
        seen = honest(self, arm, tokens)
        if arm == "on":
            logits = seen.logits.copy()
            logits.view(np.uint32)[-1, -1, -1] ^= 1
            object.__setattr__(seen, "logits", logits)
        return seen

    monkeypatch.setattr(engine._Runner, "run", tampered)
    code = main(arguments(model_dir, text, "--chunks", 1, "--arms", "off,on", "--json", "-"))
    out, err = capsys.readouterr()
    assert code == 1
    assert json.loads(out)["bitwise_equal"] is False
    assert err.splitlines()[-1].startswith("jax-iser prefill: error: balancing changed the logits")


def test_bytes_are_compared_not_numbers():
    nan = np.full(2, np.nan, np.float32)
    assert engine._same_bytes(nan, nan.copy())
    assert not engine._same_bytes(np.float32([0.0]), np.float32([-0.0]))


def test_bits_leave_separators_out():
    logits = jax.random.normal(jax.random.key(0), (3, 5, 256)) * 9
    targets = np.arange(15).reshape(3, 5) % 4
    expected = float(bits_per_byte(logits, targets)) * (targets != 0).sum()
    assert engine.text_bits(np.asarray(logits), targets, 0) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ep", "3"], ["num_experts=16", "3 ranks"]),
        (["--ep", "8", "--ranks-per-device", "3"], ["--ep 8", "--ranks-per-device 3"]),
        (["--ep", "0"], ["0 is below 1"]),
        (["--sequence-length", "32"], ["--tokens-per-rank 16", "--sequence-length 32"]),
        (["--slots", "17"], ["17 is above 16"]),
        (["--tokens-per-rank", "4096"], ["601 bytes", "32769"]),
        (["--text", "/nowhere/x"], ["/nowhere/x"]),
        (["--model", "/nowhere"], ["/nowhere", "config.json"]),
        (["--arms", "off,maybe"], ["off,maybe"]),
        (["--arms", "fb", "--record", "t.npz"], ["--record"]),
        (["--json", "/nowhere/x.json"], ["/nowhere"]),
        (["--plot", "x.txt"], ["x.txt", ".png"]),
        (["--coordinator", "127.0.0.1:1"], ["--num-processes"]),
        (
            ["--coordinator", "noport", "--num-processes", "2", "--process-id", "0"],
            ["--coordinator noport is not HOST:PORT"],
        ),
        (
            ["--coordinator", "h:1", "--num-processes", "3", "--process-id", "0"],
            ["8 devices", "--num-processes 3"],
        ),
        (["--weight-dtype", "int8"], ["'int8'", "float8_e4m3fn"]),
        (
            ["--weight-dtype", "float8_e4m3fn"],
            ["--weight-dtype float8_e4m3fn", "hidden_size=32 is not a multiple of 64"],
        ),
        (["--nonsense"], ["--nonsense"]),
        (["--platform", "gpu"], ["--platform gpu", "JAX_PLATFORMS=cpu"]),
        (
            ["--platform=gpu", "--coordinator=h:1", "--num-processes=2", "--process-id=0"],
            ["--platform gpu", "--coordinator"],
        ),
    ],
)
def test_bad_usage_is_one_clear_line(model_dir, text, capsys, options, words):
    with pytest.raises(SystemExit) as stop:
        sys.exit(main(arguments(model_dir, text, *options)))
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("jax-iser prefill: error: ")
    assert all(word in err for word in words), err


def test_too_few_devices_in_xla_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    with pytest.raises(UsageError, match=r"=4, but --ep 8 needs 8 devices"):
        _devices.force_devices(8, "--ep 8")
    _devices.force_devices(4, "--ep 4")
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=4"


def damaged(model_dir, tmp_path, change):
    """A copy of the model whose tensors `change` has altered."""
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_a_wrong_shape_in_the_model_file(model_dir, text, tmp_path, capsys):
    def narrow(tensors):
        tensors["layers.1.moe.up"] = tensors["layers.1.moe.up"][:, :-1].copy()

    assert main(arguments(damaged(model_dir, tmp_path, narrow), text)) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "layers.1.moe.up" in err
    assert "(16, 23, 32)" in err
    assert "(16, 24, 32)" in err


def test_a_truncated_model_file(model_dir, text, tmp_path, capsys):
    damaged(model_dir, tmp_path, lambda tensors: None)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(arguments(tmp_path, text)) == 1
    assert "not a readable safetensors file" in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"vocab_size": 256}', "no JSON"])
def test_a_config_that_cannot_be_read(model_dir, text, tmp_path, capsys, content):
    damaged(model_dir, tmp_path, lambda tensors: None)
    (tmp_path / "config.json").write_text(content)
    assert main(arguments(tmp_path, text)) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "config.json" in err


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.slow
def test_two_processes_of_four_devices_give_the_bits_of_one(run, model_dir, text):
    """They set their own devices; process 0 reports, and its standard output is pure JSON."""
    address = f"127.0.0.1:{free_port()}"
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "jax_iser.cli", *arguments(model_dir, text)]
    command += ["--arms", "off,on", "--json", "-", "--coordinator", address, "--num-processes", "2"]
    started = [
        subprocess.Popen(
            [*command, "--process-id", str(i)],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], ended
    result = json.loads(ended[0][0])
    assert ended[1][0] == ""
    assert result["bitwise_equal"] is True
    assert result["logits_sha256"] == run[0]["logits_sha256"]
    assert result["imbalance_on_mean"] == run[0]["imbalance_on_mean"]
    assert result["busy_max_on_s"] > 0
