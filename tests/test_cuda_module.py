"""The CUDA extension where it is built, without a GPU: it loads, and programs lower for one."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from layers import AXIS, PLAN_SPECS, make_fp8_problem, make_problem

import jax_iser
from jax_iser import DomainHandle

_iser_cuda = pytest.importorskip("jax_iser._iser_cuda", reason="the CUDA extension is not built")


def config_of(problem, **knobs):
    ranks_per_device = knobs.pop("ranks_per_device", 4)
    return jax_iser.DomainConfig(
        num_ranks=problem.num_ranks,
        ranks_per_device=ranks_per_device,
        platform="cuda",
        **(problem.sizes | knobs),
    )


def lower(problem, config):
    """The layer's program for two GPUs, which nobody has to have."""
    mesh = AbstractMesh((config.num_devices,), (AXIS,), axis_types=(AxisType.Auto,))

    def on_device(x, ids, topk_weights, weights, words):
        handle = DomainHandle(words, config)
        return jax_iser.moe_layer(
            x, ids, topk_weights, weights, handle, shared_expert=lambda x: 2 * x
        )

    call = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=P(AXIS),
        out_specs=(P(AXIS), PLAN_SPECS),
        check_vma=False,
    )
    words = jax.ShapeDtypeStruct((config.num_devices, 4), jnp.uint32)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), problem.operands)
    return jax.jit(call).trace(*shapes, words).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_layer_lowers_for_gpus(dtype):
    problem = make_problem(dtype=dtype, hidden=64, intermediate=128)
    config = config_of(problem)
    text = lower(problem, config)
    for name in ("start", "fused_moe"):
        assert text.count(f"@jax_iser.{name}(") == 1
    assert text.count(f"config = {config.digest} : i64") == 2
    from jax_iser.domain.cuda.runtime import workspace_bytes

    assert f"tensor<{workspace_bytes(config, 24)}xui8>" in text


def test_scratch_grows_with_tokens_and_not_with_the_limit_of_waits():
    from jax_iser.domain.cuda.runtime import workspace_bytes

    config = config_of(make_problem(hidden=64, intermediate=128), max_tokens_per_rank=512)
    sizes = [workspace_bytes(config, tokens) for tokens in (0, 24, 512)]
    assert sizes == sorted(sizes)
    assert sizes[0] > 0
    slow = dataclasses.replace(config, timeout_s=1.0)
    assert workspace_bytes(slow, 512) == sizes[-1]
    assert slow.digest != config.digest


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a GPU")
def test_a_domain_without_a_gpu_is_a_clear_error():
    with pytest.raises(RuntimeError, match="cudaError"):
        _iser_cuda.open_device(0, 1)
    with pytest.raises(ValueError, match=r"GPU 99 is outside 0\.\.63"):
        _iser_cuda.open_device(99, 1)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"copy_sms": 0}, "copy_sms=0 on platform cuda: GPUs take 1 to 64"),
        ({"copy_sms": 65}, "copy_sms=65 on platform cuda"),
    ],
)
def test_bad_options(knobs, words):
    with pytest.raises(ValueError, match=words):
        config_of(make_problem(), **knobs)


def test_sizes_that_kernels_do_not_take():
    from jax_iser.domain.cuda.runtime import workspace_bytes

    problem = make_problem(hidden=33, intermediate=48)
    with pytest.raises(ValueError, match="33"):
        workspace_bytes(config_of(problem), 24)


def test_fp8_layers_lower_for_gpus():
    from jax_iser.domain.cuda.runtime import workspace_bytes

    problem = make_fp8_problem(dtype="bfloat16")
    config = config_of(problem)
    text = lower(problem, config)
    assert f"tensor<{workspace_bytes(config, 24)}xui8>" in text
    assert f"tensor<32x{config.bundle.planes[0].num_bytes}xui8>" in text


def test_fp8_with_f32_tokens_is_refused():
    from jax_iser.domain.cuda.runtime import workspace_bytes

    config = config_of(make_fp8_problem(dtype="float32"))
    with pytest.raises(ValueError, match="FP8 weights take engine=tensor, bf16"):
        workspace_bytes(config, 24)
