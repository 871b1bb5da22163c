"""`load_hf`: every tensor under the prefix is read or named, and FP8 scales are applied."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from layers import assert_same_bits
from safetensors import safe_open
from safetensors.numpy import save_file

import jax_iser
from jax_iser.experts.formats import float8_block128
from jax_iser.nnx import MoE, load_hf

E4M3 = ml_dtypes.float8_e4m3fn
EXPERTS, D, INNER = 4, 256, 128
SHAPES = {"gate": (INNER, D), "up": (INNER, D), "down": (D, INNER)}
PREFIX = "model.layers.3."


def make_moe(**options):
    sizes = {"num_experts": EXPERTS, "top_k": 2}
    return MoE(D, INNER, **sizes | options, rngs=nnx.Rngs(0))


def plain_tensors(*, shared=None, bias=False, num_experts=EXPERTS, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    tensors = {"mlp.gate.weight": draw((num_experts, D), np.float32)}
    if bias:
        tensors["mlp.gate.e_score_correction_bias"] = draw(num_experts, np.float32)
    stems = [f"mlp.experts.{e}" for e in range(num_experts)] + ([shared] if shared else [])
    for stem in stems:
        for plane, shape in SHAPES.items():
            tensors[f"{stem}.{plane}_proj.weight"] = 0.02 * draw(shape, np.float32)
    return {PREFIX + name: value for name, value in tensors.items()}


def spread(scale, shape):
    """Scales of blocks, of rows or of a tensor, value by value."""
    if scale.ndim == 2 and scale.shape != (shape[0], 1):
        scale = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: shape[0], : shape[1]]
    return np.broadcast_to(scale.reshape(-1, 1) if scale.ndim == 1 else scale, shape)


def quantised(tensors, scale_of, name="weight_scale_inv", dtype=E4M3):
    """The projections in FP8 beside scales; and the very values that they stand for."""
    found, values = {}, dict(tensors)
    for key, value in tensors.items():
        found[key] = value
        if not key.endswith("_proj.weight"):
            continue
        scale = scale_of(value)
        codes = (value / spread(scale, value.shape)).astype(dtype)
        found[key], found[key.removesuffix("weight") + name] = codes, scale
        values[key] = codes.astype(np.float32) * spread(scale.astype(np.float32), value.shape)
    return found, values


def block_scale(value):
    """One scale for each 128 x 128, every one of another size."""
    grid = (-(-value.shape[0] // 128), -(-value.shape[1] // 128))
    steps = np.arange(grid[0] * grid[1], dtype=np.float32).reshape(grid)
    return (0.001 * (1 + steps)).astype(np.float32)


SCALES = {
    "blocks": (block_scale, "weight_scale_inv"),
    "tensor": (lambda value: np.array([abs(value).max() / 448], np.float32), "weight_scale"),
    "scalar": (lambda value: np.float32(abs(value).max() / 448).reshape(()), "weight_scale"),
    "rows": (lambda value: (abs(value).max(1) / 448).astype(np.float32), "weight_scale"),
    "column": (lambda value: (abs(value).max(1) / 448)[:, None].astype(np.float32), "weight_scale"),
    "powers": (lambda value: block_scale(value).astype(ml_dtypes.float8_e8m0fnu), "weight_scale"),
}


def planes_of(moe):
    return {name: np.asarray(getattr(moe, name).get_value()) for name in SHAPES}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("dtype", [E4M3, ml_dtypes.float8_e5m2])
def test_scales_of_fp8_weights_are_applied(kind, dtype):
    scale_of, name = SCALES[kind]
    tensors, values = quantised(plain_tensors(shared="mlp.shared_experts"), scale_of, name, dtype)
    moe = make_moe(num_shared_experts=1)
    load_hf(moe, tensors, PREFIX)
    for plane, shape in SHAPES.items():
        for expert in range(EXPERTS):
            expected = values[f"{PREFIX}mlp.experts.{expert}.{plane}_proj.weight"]
            assert expected.shape == shape
            assert_same_bits(planes_of(moe)[plane][expert], expected, f"{plane} of {expert}")
        expected = values[f"{PREFIX}mlp.shared_experts.{plane}_proj.weight"]
        assert_same_bits(getattr(moe, f"shared_{plane}").get_value(), expected)
    assert_same_bits(moe.router.get_value(), tensors[PREFIX + "mlp.gate.weight"])


@pytest.mark.parametrize("kind", ["blocks", "tensor", "scalar", "rows"])
def test_modules_of_fp8_planes_keep_the_bits_of_blocks(kind):
    tensors, values = quantised(plain_tensors(), *SCALES[kind])
    moe = make_moe(weight_dtype="float8_e4m3fn")
    load_hf(moe, tensors, PREFIX)
    for plane, shape in SHAPES.items():
        found = jax_iser.dequantize_fp8(moe.__dict__[plane].get_value(), *shape)
        for expert in range(EXPERTS):
            expected = values[f"{PREFIX}mlp.experts.{expert}.{plane}_proj.weight"]
            if kind == "rows":  # quantised again, by blocks: half a step of e4m3, 1/16
                np.testing.assert_allclose(
                    found[expert], expected, rtol=0.07, atol=abs(expected).max() / 448
                )
            else:
                assert_same_bits(found[expert], expected, f"{plane} of {expert}")


def with_fault(change, **options):
    tensors = plain_tensors(**options)
    change(tensors)
    return tensors


def put(name, value):
    return lambda tensors: tensors.__setitem__(PREFIX + name, value)


def take(name):
    return lambda tensors: tensors.__delitem__(PREFIX + name)


UP = "mlp.experts.2.up_proj."
FAULTS = {
    "fp8 without a scale": (
        put(UP + "weight", np.ones((INNER, D), E4M3)),
        ValueError,
        r"experts\.2\.up_proj\.weight is FP8 without a scale: neither .*weight_scale_inv nor ",
    ),
    "a scale of f32 weights": (
        put(UP + "weight_scale", np.ones(1, np.float32)),
        TypeError,
        r"up_proj\.weight_scale is the scale of FP8 weights, but .* is float32; leave the scale",
    ),
    "two scales": (
        put(UP + "weight_scale_inv", np.ones(1, np.float32)),
        TypeError,
        r"is the scale of FP8 weights",
    ),
    "integers": (
        put(UP + "weight", np.ones((INNER, D), np.int8)),
        TypeError,
        r"up_proj\.weight is int8, expected floats; dequantise",
    ),
    "another shape": (
        put(UP + "weight", np.ones((INNER, D - 1), np.float32)),
        ValueError,
        r"up_proj\.weight has shape \(128, 255\), expected \(128, 256\)",
    ),
    "a missing tensor": (
        take(UP + "weight"),
        ValueError,
        r"^model\.layers\.3\.mlp\.experts\.2\.up_proj\.weight is missing; the tensors under "
        r'"model\.layers\.3\.mlp\." are experts\.\{0\.\.3\}\.down_proj\.weight, ',
    ),
    "a bias of the router": (
        put("mlp.gate.e_score_correction_bias", np.ones(EXPERTS, np.float32)),
        ValueError,
        r"no place for model\.layers\.3\.mlp\.gate\.e_score_correction_bias: make the MoE with "
        r"routed_bias=True; or leave them out by ignore=",
    ),
    "a shared expert": (
        put("mlp.shared_experts.up_proj.weight", np.ones((INNER, D), np.float32)),
        ValueError,
        r"no place for .*mlp\.shared_experts\.up_proj\.weight: make the MoE with num_shared_exp",
    ),
    "a gated shared expert": (
        put("mlp.shared_expert_gate.weight", np.ones((1, D), np.float32)),
        ValueError,
        r"no place for .*shared_expert_gate\.weight: make the MoE with shared_expert_gate=True",
    ),
    "a bias of an expert": (
        put(UP + "bias", np.ones(INNER, np.float32)),
        ValueError,
        r"no place for .*experts\.2\.up_proj\.bias: make the MoE with expert_biases=True",
    ),
    "an unknown tensor": (
        put("mlp.norm.weight", np.ones(D, np.float32)),
        ValueError,
        r"no place for model\.layers\.3\.mlp\.norm\.weight: or leave them out by ignore=",
    ),
    "one expert more": (
        put("mlp.experts.4.up_proj.weight", np.ones((INNER, D), np.float32)),
        ValueError,
        r"the checkpoint has expert 4 \(.*experts\.4\.\*\), the MoE has num_experts=4; make it with"
        r" num_experts=5",
    ),
    "a scale of another grid": (
        lambda tensors: tensors.update(
            {
                PREFIX + UP + "weight": np.ones((INNER, D), E4M3),
                PREFIX + UP + "weight_scale_inv": np.ones((2, 2), np.float32),
            }
        ),
        ValueError,
        r"weight_scale_inv has shape \(2, 2\), expected \(1, 2\) for the blocks of 128 x 128",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_do_not_fit_leave_the_module_as_it_was(name):
    change, kind, words = FAULTS[name]
    moe = make_moe()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(moe)))
    with pytest.raises(kind, match=words):
        load_hf(moe, with_fault(change), PREFIX)
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(moe)))
    for path, value in jax.tree_util.tree_leaves_with_path(before):
        assert_same_bits(dict(jax.tree_util.tree_leaves_with_path(after))[path], value, str(path))


def test_names_that_begin_otherwise_are_named():
    words = (
        r'no tensor\'s name begins with "mlp\."; names are model\.layers\.3\.mlp\.experts\.\{0\.'
    )
    with pytest.raises(ValueError, match=words):
        load_hf(make_moe(), plain_tensors())


def test_tensors_of_other_layers_and_other_blocks_are_not_looked_at():
    tensors = plain_tensors() | {
        "model.layers.30.mlp.gate.bias": np.ones(3, np.int8),
        PREFIX + "self_attn.q_proj.weight": np.ones(3, np.int8),
    }
    load_hf(make_moe(), tensors, PREFIX)


def test_tensors_are_left_out_on_request():
    tensors = plain_tensors(shared="mlp.shared_expert")
    put("mlp.shared_expert_gate.weight", np.ones((1, D), np.float32))(tensors)
    moe = make_moe()
    load_hf(moe, tensors, PREFIX, ignore=("mlp.shared_expert*",))
    expected = tensors[PREFIX + "mlp.experts.3.down_proj.weight"]
    assert_same_bits(planes_of(moe)["down"][3], expected)


def test_static_scales_of_tokens_are_named():
    tensors, _ = quantised(plain_tensors(), *SCALES["tensor"])
    put(UP + "input_scale", np.ones(1, np.float32))(tensors)
    with pytest.raises(ValueError, match=r"input_scale: tokens are scaled as they come"):
        load_hf(make_moe(), tensors, PREFIX)
    load_hf(make_moe(), tensors, PREFIX, ignore=("*.input_scale",))


def test_stacked_modules_are_refused():
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return MoE(D, INNER, num_experts=EXPERTS, top_k=2, rngs=rngs)

    with pytest.raises(ValueError, match="is stacked over 2 layers; load each layer's own module"):
        load_hf(make(nnx.Rngs(0)), plain_tensors(), PREFIX)


# Where tensors come from


class FakeTensor:
    """What `load_hf` uses of `torch.Tensor`, which knows bfloat16 and NumPy's bytes only."""

    is_meta = False

    def __init__(self, array, dtype=None):
        self.array, self.shape = array, array.shape
        self.dtype = dtype or f"torch.{array.dtype.name}"

    def detach(self):
        return self

    cpu = contiguous = detach

    def reshape(self, *shape):
        return FakeTensor(self.array.reshape(*shape), self.dtype)

    def view(self, dtype):
        assert dtype == "torch.uint8"
        return FakeTensor(self.array.view(np.uint8))

    def numpy(self):
        if self.dtype != "torch.uint8":
            raise TypeError(f"Got unsupported ScalarType {self.dtype}")
        return self.array

    def __array__(self, dtype=None, copy=None):
        return self.numpy()


def check_tensors_of_torch(make_tensor, fp8_kind="blocks"):
    tensors, values = quantised(plain_tensors(), *SCALES[fp8_kind])
    router = tensors[PREFIX + "mlp.gate.weight"].astype(ml_dtypes.bfloat16)
    tensors[PREFIX + "mlp.gate.weight"] = router
    moe = make_moe()
    load_hf(moe, {name: make_tensor(value) for name, value in tensors.items()}, PREFIX)
    assert_same_bits(moe.router.get_value(), router.astype(np.float32))
    expected = values[f"{PREFIX}mlp.experts.1.gate_proj.weight"]
    assert_same_bits(planes_of(moe)["gate"][1], expected)


def test_tensors_like_those_of_torch(monkeypatch):
    torch = types.SimpleNamespace(Tensor=FakeTensor, uint8="torch.uint8")
    monkeypatch.setitem(sys.modules, "torch", torch)
    check_tensors_of_torch(FakeTensor)
    check_tensors_of_torch(FakeTensor, "powers")
    odd = {PREFIX + "mlp.gate.weight": FakeTensor(np.zeros(3), "torch.quint8")}
    with pytest.raises(TypeError, match=r"mlp\.gate\.weight is torch\.quint8, expected floats"):
        load_hf(make_moe(), plain_tensors() | odd, PREFIX)


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")

    def make_tensor(array):
        flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())
        return flat.view(getattr(torch, array.dtype.name)).reshape(array.shape)

    check_tensors_of_torch(make_tensor)


@pytest.mark.parametrize("framework", ["numpy", "flax"])
def test_an_open_safetensors_file(tmp_path, framework):
    tensors = plain_tensors()
    stored = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    moe = make_moe(param_dtype=jnp.bfloat16)
    with safe_open(tmp_path / "model.safetensors", framework) as file:
        load_hf(moe, file, PREFIX)
    expected = stored[PREFIX + "mlp.experts.2.down_proj.weight"]
    assert_same_bits(planes_of(moe)["down"][2], expected)


def test_files_of_fp8_by_path(tmp_path):
    tensors, values = quantised(plain_tensors(), *SCALES["powers"])
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, part_names in parts.items():
        save_file({name: tensors[name] for name in part_names}, tmp_path / part)
    weight_map = {name: part for part, part_names in parts.items() for name in part_names}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    expected = values[f"{PREFIX}mlp.experts.1.gate_proj.weight"]
    for _ in range(2):  # by the index, then by what the folder holds
        moe = make_moe()
        load_hf(moe, tmp_path, PREFIX)
        assert_same_bits(planes_of(moe)["gate"][1], expected)
        index.unlink(missing_ok=True)
    save_file(tensors, tmp_path / "c.safetensors")
    load_hf(make_moe(), str(tmp_path / "c.safetensors"), PREFIX)
    with (
        safe_open(tmp_path / "c.safetensors", "numpy") as file,
        pytest.raises(TypeError, match=r"cannot read .* pass the path of the file instead"),
    ):
        load_hf(make_moe(), file, PREFIX)


def test_sources_that_are_none(tmp_path):
    with pytest.raises(TypeError, match="tensors is a list, expected a mapping of arrays by name"):
        load_hf(make_moe(), [1], PREFIX)
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors file"):
        load_hf(make_moe(), tmp_path, PREFIX)
    (tmp_path / "text.safetensors").write_bytes(b"not a file of tensors at all")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_hf(make_moe(), tmp_path / "text.safetensors", PREFIX)
    save_file(plain_tensors(), tmp_path / "whole.safetensors")
    data = (tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "text.safetensors").write_bytes(data[:-5])
    with pytest.raises(ValueError, match=r"ends after \d+ of \d+ bytes"):
        load_hf(make_moe(), tmp_path / "text.safetensors", PREFIX)
    with pytest.raises(TypeError, match=r"gate\.weight is a dict, expected an array"):
        load_hf(make_moe(), plain_tensors() | {PREFIX + "mlp.gate.weight": {}}, PREFIX)


# Layouts of other families.


def fused_tensors(*, transposed=False, order="halves", biases=False, seed=0):
    """All experts in one tensor each, and the planes that they stand for."""
    draw = np.random.default_rng(seed).standard_normal
    planes = {name: draw((EXPERTS, *shape), np.float32) for name, shape in SHAPES.items()}
    planes |= {
        f"{name}_bias": draw((EXPERTS, shape[0]), np.float32) for name, shape in SHAPES.items()
    }

    def joined(gate, up):
        if order == "halves":
            return np.concatenate([gate, up], 1)
        return np.stack([gate, up], 2).reshape(EXPERTS, 2 * gate.shape[1], *gate.shape[2:])

    gate_up, down = joined(planes["gate"], planes["up"]), planes["down"]
    tensors = {
        "gate.weight": draw((EXPERTS, D), np.float32),
        "experts.gate_up_proj": gate_up.transpose(0, 2, 1) if transposed else gate_up,
        "experts.down_proj": down.transpose(0, 2, 1) if transposed else down,
    }
    if biases:
        tensors["experts.gate_up_proj_bias"] = joined(planes["gate_bias"], planes["up_bias"])
        tensors["experts.down_proj_bias"] = planes["down_bias"]
    return {f"{PREFIX}mlp.{name}": value for name, value in tensors.items()}, planes


# What is transposed, the order of gate and up, whether there are biases, and gate_up_order=.
FUSED = {
    "transformers 5": (False, "halves", False, None),
    "gpt-oss": (True, "interleaved", True, None),
    "transposed halves": (True, "halves", False, "halves"),
    "transposed halves with biases": (True, "halves", True, "halves"),
    "interleaved rows": (False, "interleaved", False, "interleaved"),
}


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("weight_format", [None, "float8_block128"])
def test_fused_tensors(kind, weight_format):
    transposed, order, biases, given = FUSED[kind]
    tensors, planes = fused_tensors(transposed=transposed, order=order, biases=biases)
    moe = make_moe(expert_biases=biases, weight_format=weight_format)
    load_hf(moe, tensors, PREFIX, gate_up_order=given)
    for name, variable in moe.expert_variables().items():
        expected = planes[name]
        if weight_format is not None and name in SHAPES:
            expected = float8_block128.quantize_plane(jnp.asarray(expected))
        assert_same_bits(variable.get_value(), expected, f"{kind}: {name}")


@pytest.mark.parametrize("inner", [D // 2, D])
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_tensors_that_are_square_in_one_place(inner, transposed):
    """Where 2I = D gate_up_proj looks alike both ways, where I = D down_proj does."""
    draw = np.random.default_rng(1).standard_normal
    gate_up, down = draw((2, 2 * inner, D), np.float32), draw((2, D, inner), np.float32)
    turn = (0, 2, 1) if transposed else (0, 1, 2)
    tensors = {
        "mlp.gate.weight": np.ones((2, D), np.float32),
        "mlp.experts.gate_up_proj": gate_up.transpose(turn),
        "mlp.experts.down_proj": down.transpose(turn),
    }
    moe = MoE(D, inner, num_experts=2, top_k=1, rngs=nnx.Rngs(0))
    load_hf(moe, tensors, gate_up_order="halves")
    assert_same_bits(moe.gate.get_value(), gate_up[:, :inner])
    assert_same_bits(moe.up.get_value(), gate_up[:, inner:])
    assert_same_bits(moe.down.get_value(), down)


def test_names_of_mixtral():
    tensors, moe, twin = plain_tensors(), make_moe(), make_moe()
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "mlp.": "block_sparse_moe."}
    renamed = {}
    for name, value in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = value
    load_hf(moe, renamed, PREFIX)
    load_hf(twin, tensors, PREFIX)
    for name, plane in planes_of(twin).items():
        assert_same_bits(planes_of(moe)[name], plane, name)
    del renamed[PREFIX + "block_sparse_moe.experts.0.w2.weight"]
    with pytest.raises(ValueError, match=r"block_sparse_moe\.experts\.0\.w2\.weight is missing;"):
        load_hf(moe, renamed, PREFIX)
    with pytest.raises(ValueError, match=r'"model.layers.3.mlp." and with .*block_sparse_moe."'):
        load_hf(moe, renamed | tensors, PREFIX)


@pytest.mark.parametrize("name", ["gate.", "router."])
def test_biases_and_gates_beside_experts(name):
    tensors, draw = (
        plain_tensors(shared="mlp.shared_expert"),
        np.random.default_rng(2).standard_normal,
    )
    tensors[f"{PREFIX}mlp.{name}weight"] = tensors.pop(PREFIX + "mlp.gate.weight")
    bias = tensors[f"{PREFIX}mlp.{name}bias"] = draw(EXPERTS, np.float32)
    gate = tensors[PREFIX + "mlp.shared_expert_gate.weight"] = draw((1, D), np.float32)
    biases = {
        f"{plane}_bias": draw((EXPERTS, shape[0]), np.float32) for plane, shape in SHAPES.items()
    }
    for expert in range(EXPERTS):
        for plane in SHAPES:
            key = f"{PREFIX}mlp.experts.{expert}.{plane}_proj.bias"
            tensors[key] = biases[f"{plane}_bias"][expert]
    options = {"router_bias": True, "expert_biases": True, "shared_expert_gate": True}
    moe = make_moe(num_shared_experts=1, **options)
    load_hf(moe, tensors, PREFIX)
    for variable, value in (biases | {"router_bias": bias, "shared_expert_gate": gate}).items():
        assert_same_bits(getattr(moe, variable).get_value(), value, variable)
    for option in options:
        wrong = make_moe(num_shared_experts=1, **options | {option: False})
        with pytest.raises(ValueError, match=f"make the MoE with {option}=True"):
            load_hf(wrong, tensors, PREFIX)


FUSED_FAULTS = {
    "gate_up of another shape": (
        ("experts.gate_up_proj", np.ones((EXPERTS, D, INNER), np.float32)),
        r"gate_up_proj has shape \(4, 256, 128\), expected \(4, 256, 256\) or, transposed, ",
    ),
    "one is transposed": (
        ("experts.gate_up_proj", np.ones((EXPERTS, D, 4 * INNER), np.float32)),
        r"gate_up_proj has shape \(4, 256, 512\)",
    ),
    "a bias of another shape": (
        ("experts.gate_up_proj_bias", np.ones((EXPERTS, INNER), np.float32)),
        r"gate_up_proj_bias has shape \(4, 128\), expected \(4, 256\)",
    ),
    "a missing bias": (
        ("experts.down_proj_bias", None),
        r"^model\.layers\.3\.mlp\.experts\.0\.down_proj\.bias is missing",
    ),
    "fp8": (
        ("experts.down_proj", np.ones((EXPERTS, INNER, D), E4M3)),
        r"experts\.down_proj is float8_e4m3fn, expected floats of 16 bits or more; dequantise",
    ),
    "separate experts too": (
        ("experts.1.up_proj.weight", np.ones((INNER, D), np.float32)),
        r"experts\.0\.up_proj\.weight is missing",
    ),
}


@pytest.mark.parametrize("name", FUSED_FAULTS)
def test_fused_tensors_that_do_not_fit_leave_the_module_as_it_was(name):
    (key, value), words = FUSED_FAULTS[name]
    tensors, _ = fused_tensors(transposed=True, order="interleaved", biases=True)
    tensors[f"{PREFIX}mlp.{key}"] = value
    if value is None:
        del tensors[f"{PREFIX}mlp.{key}"]
    moe = make_moe(expert_biases=True)
    before = planes_of(moe)
    with pytest.raises((ValueError, TypeError), match=words):
        load_hf(moe, tensors, PREFIX)
    for plane, expected in before.items():
        assert_same_bits(planes_of(moe)[plane], expected)


def test_an_order_that_shapes_leave_open():
    tensors, _ = fused_tensors(transposed=True)
    with pytest.raises(ValueError, match='pass gate_up_order="halves" or gate_up_order="inter'):
        load_hf(make_moe(), tensors, PREFIX)
    with pytest.raises(ValueError, match="gate_up_order='columns' is not one of"):
        load_hf(make_moe(), tensors, PREFIX, gate_up_order="columns")
    moe = MoE(D, 64, num_experts=EXPERTS, top_k=2, rngs=nnx.Rngs(0))
    tensors = {
        "mlp.gate.weight": np.ones((EXPERTS, D), np.float32),
        "mlp.experts.gate_up_proj": np.ones((EXPERTS, D, 128), np.float32),
        "mlp.experts.down_proj": np.ones((EXPERTS, D, 64), np.float32),
    }
    with pytest.raises(ValueError, match="one is transposed, the other is not"):
        load_hf(moe, tensors)
