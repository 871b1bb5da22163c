"""The language model, its module, its checkpoint, its training; and what it really predicts."""

import dataclasses
import functools
import gzip
import json
import pathlib
import re
import sysconfig
from zlib import crc32

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import jax_iser.models as models
from jax_iser.experts.formats import float8_block128 as fp8
from jax_iser.models import data, evaluate, train
from jax_iser.models.generate import stream
from jax_iser.nnx import Fp8Plane, MoE, RoutedBias, load_hf, plan_telemetry
from jax_iser.plan import Plan, plan_counts

TINY = models.ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=16,
    num_experts=8,
    top_k=2,
    shared_intermediate_size=16,
    max_seq_len=32,
)
IN_BLOCKS = dataclasses.replace(TINY, hidden_size=128, intermediate_size=256)
GSM8K_TEST = pathlib.Path(__file__).parents[2] / "shared" / "text" / "gsm8k_test.jsonl.gz"


def make_mesh(num_devices=8, axis_type=AxisType.Auto):
    return jax.make_mesh((num_devices,), ("ep",), axis_types=(axis_type,))


def tiny_model(**options):
    return models.MoELM(TINY, rngs=nnx.Rngs(0), **options)


def tokens(batch=8, seq=16, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (batch, seq)).astype(np.int32)


@functools.cache
def trained():
    return models.from_pretrained(models.default_directory(), balance="none")


# The model and the mesh


def test_ranks_agree_with_one_device_and_record_what_they_did():
    run = nnx.jit(models.prefill, static_argnames="forced_routing")
    expected, _ = run(tiny_model(), tokens())
    spread = tiny_model(mesh=make_mesh(), method="portable")
    logits, layers = run(spread, tokens())
    # XLA's reductions over other per-device shapes differ in the last bits.
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert len(layers) == TINY.num_layers
    for layer in layers:
        ids = np.asarray(layer["topk_ids"])
        assert ids.shape == (8 * 16, TINY.top_k)
        load = np.bincount(ids.ravel(), minlength=8)
        assert (np.asarray(layer["load_before"]) == load).all()
        assert layer["imbalance_before"] == pytest.approx(load.max() / load.mean())
        assert layer["load"].sum() == ids.size
        assert (np.asarray(layer["plan"].route_slot) >= 0).all()


def test_forced_routing_loads_every_rank_alike():
    model = tiny_model(mesh=make_mesh(), method="portable")
    run = nnx.jit(functools.partial(models.prefill, forced_routing="balanced"))
    _, layers = run(model, tokens())
    for layer in layers:
        assert layer["load_before"].tolist() == [8 * 16 * TINY.top_k // 8] * 8
        assert layer["broadcasts"] == 0


def test_a_token_does_not_see_the_future():
    run = nnx.jit(lambda text: tiny_model()(text))
    before = tokens(1)
    after = before.copy()
    after[0, 10:] = 7
    first, second = run(before), run(after)
    np.testing.assert_allclose(first[0, :10], second[0, :10], atol=1e-5)
    assert np.abs(first[0, 10:] - second[0, 10:]).max() > 1e-2


def test_decoding_with_a_cache_equals_reading_at_once():
    model, text = tiny_model(), tokens(1)
    expected = nnx.jit(lambda model, text: model(text))(model, text)
    caches = model.empty_caches(1, 20)
    decode = nnx.jit(lambda model, *args: model.decode(*args))
    first, caches = decode(model, text[:, :9], jnp.int32(0), caches)
    np.testing.assert_allclose(first, expected[:, :9], atol=1e-4)
    for position in range(9, 16):
        step = text[:, position : position + 1]
        logits, caches = decode(model, step, jnp.int32(position), caches)
        np.testing.assert_allclose(logits[:, 0], expected[:, position], atol=1e-4)


def test_an_explicit_mesh_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"Explicit.*AxisType.Auto"):
        tiny_model(mesh=make_mesh(axis_type=AxisType.Explicit))


# The module


def make_moe(**options):
    sizes = {"num_experts": 8, "top_k": 2, "num_shared_experts": 1, "routed_bias": True}
    return MoE(16, 24, **sizes, **options, rngs=nnx.Rngs(1))


def inputs(batch=8):
    return jax.random.normal(jax.random.key(0), (batch, 4, 16))


def test_module_runs_under_every_transformation():
    moe, x = make_moe(mesh=make_mesh(2), method="portable", balance="none"), inputs()
    expected = nnx.jit(lambda moe, x: moe(x))(moe, x)
    np.testing.assert_array_equal(jax.jit(moe)(x), expected)
    graph, state = nnx.split(moe)
    assert hash(graph) == hash(nnx.split(moe)[0])
    call = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.checkpoint(call))(state, x), expected)
    gradients = jax.jit(jax.grad(lambda s, x: (jax.checkpoint(call)(s, x) ** 2).sum(), 1))(state, x)
    plain = jax.jit(jax.grad(lambda x: (moe(x) ** 2).sum()))(x)
    np.testing.assert_allclose(gradients, plain, rtol=1e-5, atol=1e-5)


def test_module_in_a_scan_over_stacked_layers():
    layers = [make_moe(mesh=make_mesh(2), method="portable", layer=i) for i in range(3)]
    for index, layer in enumerate(layers):
        layer.router.set_value(layer.router.get_value() + index)
    graph = nnx.split(layers[0])[0]
    stacked = jax.tree.map(lambda *s: jnp.stack(s), *(nnx.split(layer)[1] for layer in layers))

    @jax.jit
    def scanned(stacked, x):
        def body(x, layer):
            index, state = layer
            return x + nnx.merge(graph, state)(x, layer=index), None

        return jax.lax.scan(body, x, (jnp.arange(3), stacked))[0]

    @jax.jit
    def looped(states, x):
        for state in states:
            x = x + nnx.merge(graph, state)(x)
        return x

    expected = looped([nnx.split(layer)[1] for layer in layers], inputs())
    np.testing.assert_allclose(scanned(stacked, inputs()), expected, rtol=1e-5, atol=1e-5)


def test_the_bias_gets_no_gradient_and_experts_are_sharded():
    moe = make_moe(mesh=make_mesh(2), method="portable", balance="none")
    assert moe.gate.get_value().sharding.spec == P("ep", None, None)
    assert tuple(moe.gate.get_metadata()["out_sharding"]) == ("ep", None, None)
    gradients = nnx.jit(nnx.grad(lambda moe: (moe(inputs()) ** 2).sum()))(moe)
    assert "routed_bias" not in gradients
    assert all(jnp.abs(gradients[name].get_value()).max() > 0 for name in ("router", "down"))


def test_calls_change_a_module_only_under_capture():
    moe = make_moe()
    before = set(vars(moe))
    moe(inputs())
    assert set(vars(moe)) == before
    _, recorded = nnx.capture(lambda moe: moe(inputs()), nnx.Intermediate)(moe)
    assert {"load", "load_before", "imbalance", "copies", "copied_bytes"} <= set(recorded)


def test_telemetry_counts_what_a_plan_copies():
    counts = np.full((8, 16), 10, np.int32)
    counts[:, :2] = 100  # both experts of rank 0
    found = plan_counts(counts, num_helper_slots=4)
    plan = Plan(
        route_slot=None,
        broadcasts=jnp.asarray(found.broadcasts),
        quota=jnp.asarray(found.quota),
        num_broadcasts=found.num_broadcasts,
        load_before=jnp.asarray(found.load_before),
        load=jnp.asarray(found.load),
        status=0,
        generation=0,
    )
    copies = 0
    for expert, owner, level, group, *_ in found.broadcasts:
        if expert >= 0:
            size = 8 >> level
            copies += len(set(range(group * size, (group + 1) * size)) - {owner})
    telemetry = plan_telemetry(plan, bundle_bytes=1000)
    assert copies > 0
    assert telemetry["copies"] == copies
    assert telemetry["copied_bytes"] == 1000 * copies
    assert telemetry["imbalance"] < telemetry["imbalance_before"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "fused"}, "needs a mesh"),
        ({"method": "other"}, "'other'"),
        ({"balance": "static"}, "'static'"),
        ({"mesh": "ep3"}, "num_experts=8 is not divisible by the 3 devices"),
        ({"mesh": "ep2", "axis": "tp"}, 'none named axis="tp"'),
        ({"num_groups": 3, "top_k_groups": 1}, "num_experts=8 .* num_groups=3"),
    ],
)
def test_modules_that_cannot_be_built(options, words):
    if "mesh" in options:
        options = options | {"mesh": make_mesh(int(options["mesh"][2:]))}
    with pytest.raises(ValueError, match=words):
        make_moe(**options)


def test_calls_that_cannot_run():
    with pytest.raises(ValueError, match=r"\(8, 4, 15\), expected \[..., 16\]"):
        make_moe()(inputs()[..., :15])
    with pytest.raises(ValueError, match=r"needs a Domain.*attach"):
        make_moe(mesh=make_mesh(2))(inputs())
    with pytest.raises(ValueError, match="number of tokens, 7, is not divisible by the 2 ranks"):
        make_moe(mesh=make_mesh(2), method="portable")(inputs()[0, :1].repeat(7, 0))
    with pytest.raises(ValueError, match="forced_routing='all'"):
        make_moe()(inputs(), forced_routing="all")


def hf_tensors(stem="mlp.shared_experts", prefix="model.layers.3."):
    rng = np.random.default_rng(5)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    shapes = {"gate": (24, 16), "up": (24, 16), "down": (16, 24)}
    tensors = {"mlp.gate.weight": draw(8, 16), "mlp.gate.e_score_correction_bias": draw(8)}
    for plane, shape in shapes.items():
        tensors[f"{stem}.{plane}_proj.weight"] = draw(*shape)
        for expert in range(8):
            tensors[f"mlp.experts.{expert}.{plane}_proj.weight"] = draw(*shape)
    return {prefix + name: value for name, value in tensors.items()}


@pytest.mark.parametrize("stem", ["mlp.shared_experts", "mlp.shared_expert"])
def test_hugging_face_names(stem):
    moe, tensors = make_moe(score_function="sigmoid"), hf_tensors(stem)
    load_hf(moe, tensors, prefix="model.layers.3.")
    get = lambda name: tensors["model.layers.3." + name]  # noqa: E731
    x = np.asarray(inputs()).reshape(-1, 16)
    silu = lambda a: a / (1 + np.exp(-a))  # noqa: E731

    def mlp(x, name):
        gate, up, down = (get(f"{name}.{plane}_proj.weight") for plane in ("gate", "up", "down"))
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    expected = mlp(x, stem)
    scores = 1 / (1 + np.exp(-(x @ get("mlp.gate.weight").T)))
    for token, row in enumerate(scores):
        best = np.argsort(-(row + get("mlp.gate.e_score_correction_bias")))[:2]
        for expert in best:
            weight = row[expert] / row[best].sum()
            expected[token] += weight * mlp(x[token], f"mlp.experts.{expert}")
    np.testing.assert_allclose(moe(x), expected, rtol=1e-4, atol=1e-3)


def test_hugging_face_tensors_that_do_not_fit():
    prefix = "model.layers.3."
    tensors = hf_tensors()
    tensors[prefix + "mlp.experts.5.up_proj.weight"] = np.zeros((24, 15))
    message = "model.layers.3.mlp.experts.5.up_proj.weight has shape (24, 15), expected (24, 16)"
    with pytest.raises(ValueError, match=re.escape(message)):
        load_hf(make_moe(), tensors, prefix)
    with pytest.raises(ValueError, match=r"^mlp\.gate\.weight is missing"):
        load_hf(make_moe(), tensors)
    tensors = hf_tensors()
    tensors[prefix + "mlp.gate.weight"] = np.zeros((8, 16), np.int8)
    with pytest.raises(TypeError, match=r"mlp.gate.weight is int8, expected floats; dequantise"):
        load_hf(make_moe(), tensors, prefix)
    tensors[prefix + "mlp.shared_expert_gate.weight"] = np.zeros((1, 16))
    with pytest.raises(ValueError, match="shared_expert_gate"):
        load_hf(make_moe(), tensors, prefix)


# The checkpoint


@pytest.mark.parametrize("name", ["layers.0.moe.gate", "layers.1.moe.router"])
@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.bool_])
def test_weights_that_are_no_floats_are_refused(tmp_path, name, dtype):
    path = models.save(tiny_model(), tmp_path)
    stored = load_file(path)
    save_file(stored | {name: stored[name].astype(dtype)}, path)
    with pytest.raises(ValueError, match=rf"tensor {name} is \w+, expected one of F64, F32"):
        models.from_pretrained(tmp_path)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}])
def test_save_and_load(tmp_path, options):
    model = tiny_model()
    path = models.save(model, tmp_path)
    stored = load_file(path)
    assert stored["layers.0.moe.gate"].dtype == ml_dtypes.bfloat16
    assert stored["layers.0.moe.router"].dtype == np.float32
    loaded = models.from_pretrained(tmp_path, **options)
    assert loaded.config == TINY
    gate = model.layers[1].moe.gate.get_value().astype(jnp.bfloat16)
    found = loaded.layers[1].moe.gate.get_value()
    assert found.dtype == options.get("dtype", "float32")
    assert (found == gate.astype(found.dtype)).all()
    again = models.from_pretrained(tmp_path, mesh=make_mesh(2), method="portable")
    assert again.layers[0].moe.down.get_value().sharding.spec == P("ep", None, None)


def test_experts_are_quantised_when_read_and_stay_so(tmp_path):
    model = models.MoELM(IN_BLOCKS, rngs=nnx.Rngs(0))
    models.save(model, tmp_path / "plain")
    loaded = models.from_pretrained(tmp_path / "plain", weight_dtype=fp8.NAME)
    for name, shape in {"gate": (256, 128), "up": (256, 128), "down": (128, 256)}.items():
        plane = getattr(loaded.layers[1].moe, name)
        assert isinstance(plane, Fp8Plane)
        stored = getattr(model.layers[1].moe, name).get_value().astype(jnp.bfloat16)
        np.testing.assert_array_equal(plane.get_value(), fp8.quantize_plane(stored))
        assert plane.get_value().shape == (8, fp8.plane_bytes(*shape))

    path = models.save(loaded, tmp_path / "planes")
    assert load_file(path)["layers.0.moe.gate"].dtype == np.uint8
    again = models.from_pretrained(tmp_path / "planes")
    assert again.weight_dtype == fp8.NAME
    run = nnx.jit(lambda model, text: model(text))
    expected = run(loaded, tokens())
    np.testing.assert_array_equal(run(again, tokens()), expected)
    # Routed experts are off by some 6 %, and some tokens then go to another one in the next layer;
    # with the planes of other experts it is 0.87.
    plain = run(models.from_pretrained(tmp_path / "plain"), tokens())
    assert 0 < np.linalg.norm(plain - expected) / np.linalg.norm(plain) < 0.2

    spread = models.from_pretrained(tmp_path / "planes", mesh=make_mesh(2), method="portable")
    assert spread.layers[0].moe.down.get_value().sharding.spec == P("ep", None)


def test_experts_that_cannot_be_quantised(tmp_path):
    models.save(tiny_model(), tmp_path)
    with pytest.raises(ValueError, match="hidden_size=32 is not a multiple of 64"):
        models.from_pretrained(tmp_path, weight_dtype=fp8.NAME)
    path = models.save(models.MoELM(IN_BLOCKS, rngs=nnx.Rngs(0)), tmp_path)
    tensors = load_file(path)
    tensors["layers.1.moe.down"] = tensors["layers.1.moe.up"]
    save_file(tensors, path)
    words = ["layers.1.moe.down", "(8, 256, 128)", "(8, 128, 256)"]
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        models.from_pretrained(tmp_path, weight_dtype=fp8.NAME)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({"head": t["head"][:, :9]}), ["head", "(32, 9)", "(32, 256)"]),
        (lambda t: t.pop("layers.1.moe.up"), ["missing ['layers.1.moe.up']"]),
        (lambda t: t.update({"extra": t["head"]}), ["not in the model ['extra']"]),
    ],
)
def test_files_that_do_not_fit_their_config(tmp_path, change, words):
    path = models.save(tiny_model(), tmp_path)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=".*".join(map(re.escape, [str(path), *words]))):
        models.from_pretrained(tmp_path)


def test_files_that_are_not_models(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json is missing"):
        models.from_pretrained(tmp_path)
    path = models.save(tiny_model(), tmp_path)
    path.write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        models.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"depth": 3}))
    with pytest.raises(ValueError, match=r"unknown keys \['depth'\]"):
        models.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"num_heads=5 .* num_kv_heads=2"):
        dataclasses.replace(TINY, num_heads=5, num_kv_heads=2)


# The data


def test_streams_and_sequences():
    stream_ = data.to_stream(["ab", "é"])
    assert stream_.tolist() == [0, 97, 98, 0, 0xC3, 0xA9]
    inputs_, targets = data.sequences(stream_, 2)
    assert inputs_.tolist() == [[0, 97], [98, 0]]
    assert targets.tolist() == [[97, 98], [0, 0xC3]]
    with pytest.raises(ValueError, match="6 bytes, fewer than seq_len=6"):
        data.sequences(stream_, 6)


def test_sources_leave_tests_out(tmp_path):
    for name in ("a.py", "b/c.py", "test/d.py", "b/tests/e.py", "f.txt", "empty.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("" if "empty" in name else "pass\n")
    assert list(data.read_sources(tmp_path)) == ["a.py", "b/c.py"]


# Training


def write_texts(tmp_path):
    documents = [f"{i} and {i} make {2 * i}. " * 3 for i in range(400)]
    path = tmp_path / "sums.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
    return path


@pytest.mark.parametrize("scheme", ["dense", "blocked"])
def test_training_learns_and_balances(tmp_path, scheme):
    text = write_texts(tmp_path)
    sizes = (f"{k}={v}" for k, v in dataclasses.asdict(TINY).items() if k != "max_seq_len")
    options = f"--steps 60 --log-every 20 --batch 16 --seq-len 32 --warmup 5 --scheme {scheme}"
    options += " --dtype float32 --evals 1 --balance-rate 0.02"
    arguments = ["--out", str(tmp_path / "m"), "--jsonl", f"{text}:1", *options.split(), "--set"]
    assert train.main([*arguments, *sizes]) == 0
    log = [json.loads(s) for s in (tmp_path / "m" / "training_log.jsonl").read_text().splitlines()]
    bits = [record["train_bits_per_byte"] for record in log if "step" in record]
    assert len(bits) == 3
    assert bits[-1] < bits[0] - 1
    assert log[1]["data"][0]["train_documents"] == 392
    loaded = models.from_pretrained(tmp_path / "m")
    assert loaded.config == TINY
    biases = [v.get_value() for _, v in nnx.to_flat_state(nnx.state(loaded, RoutedBias))]
    assert len(biases) == TINY.num_layers
    assert all(jnp.abs(bias).max() > 0 for bias in biases)


def test_balancing_lifts_the_idle():
    bias = train.balance(jnp.zeros(4), jnp.asarray([9, 3, 4, 4]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.5, 0.5]


# What the model in the package does


def test_the_checkpoint_is_small_and_of_the_promised_shape():
    directory = models.default_directory()
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 10 * 2**20
    assert {"DATA.md", "training_log.jsonl"} <= {path.name for path in directory.iterdir()}
    config = trained().config
    assert config.num_layers >= 6
    assert (config.num_experts, config.top_k, config.num_shared_experts) == (32, 4, 1)


def read_chunks(stream_, chunks):
    bits, counts = evaluate.evaluate(trained(), stream_[: chunks * 8 * 512 + 1])
    return bits, evaluate.imbalance(counts).mean(), evaluate.balanced_imbalance(counts).mean()


def test_it_reads_source_it_was_not_trained_on():
    sources = data.read_sources(sysconfig.get_path("stdlib"))
    names = sorted(filter(data.is_held_out, sources), key=lambda name: crc32(name.encode()))
    bits, off, on = read_chunks(data.to_stream(sources[name] for name in names), 6)
    assert bits < 1.4
    assert 1.2 < off < 2
    assert on <= 1.01


def test_it_reads_gsm8k_test():
    if not GSM8K_TEST.exists():
        pytest.skip(f"the GSM8K test split is not at {GSM8K_TEST}")
    bits, off, on = read_chunks(data.to_stream(data.read_jsonl(GSM8K_TEST)), 6)
    assert bits < 1.3
    assert 1.2 < off < 2
    assert on <= 1.01


def test_it_continues_a_prompt():
    prompt = b"Anna has 3 boxes with 4 pens in each. How many pens does she have?\n"
    text = models.generate(trained(), prompt, 60, temperature=0)
    assert text == models.generate(trained(), prompt, 60, temperature=0)
    words = text.decode("ascii").split()
    assert {"pens", "boxes", "Anna", "She", "has", "in", "each"} & set(words), text
    sampled = bytes(stream(trained(), prompt, 20, temperature=1.0, seed=1))
    assert sampled == models.generate(trained(), prompt, 20, temperature=1.0, seed=1)
    assert sampled != models.generate(trained(), prompt, 20, temperature=1.0, seed=2)
    with pytest.raises(ValueError, match="temperature=-1"):
        models.generate(trained(), prompt, 5, temperature=-1)
