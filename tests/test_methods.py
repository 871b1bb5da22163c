"""The table of methods: one place for their names, and what is left of the old ones."""

import ast
import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_structure import ROOT, imports, sources

import jax_iser
from jax_iser import methods
from jax_iser.cli._prefill_options import method_choices
from jax_iser.nnx import MoE


@functools.cache
def operands():
    rng = np.random.default_rng(0)
    planes = [rng.standard_normal(shape, np.float32) for shape in ((4, 12, 8), (4, 12, 8))]
    weights = jax_iser.ExpertWeights(*planes, rng.standard_normal((4, 8, 12), np.float32))
    ids = np.argsort(rng.random((6, 4)), axis=1)[:, :2].astype(np.int32)
    return rng.standard_normal((6, 8), np.float32), ids, np.full((6, 2), 0.5, np.float32), weights


def layer(method, **options):
    return jax_iser.moe_layer(*operands(), method=method, balance="none", **options)[0]


def test_an_alias_is_the_method():
    assert methods.find_method("reference") is methods.METHODS["portable"]
    np.testing.assert_array_equal(layer("reference"), layer("portable"))
    assert MoE(8, 12, num_experts=4, top_k=2, method="reference", rngs=nnx.Rngs(0)).method == (
        "portable"
    )


def test_dense_is_the_same_layer():
    np.testing.assert_allclose(layer("dense"), layer("portable"), atol=1e-4, rtol=1e-4)


def test_a_further_method_is_one_entry(monkeypatch):
    class Zeros:
        needs_domain, spans_ranks = False, True

        def __call__(self, x, *operands, **options):
            return methods.METHODS["portable"](x * 0, *operands, **options)

    monkeypatch.setitem(methods.METHODS, "zeros", Zeros())
    assert not layer("zeros").any()
    assert "zeros" in method_choices()
    moe = MoE(8, 12, num_experts=4, top_k=2, method="zeros", rngs=nnx.Rngs(0))
    assert not moe(jnp.ones((6, 8))).any()


def test_commands_offer_what_runs_on_several_ranks():
    assert method_choices() == ["fused", "portable", "reference"]


def test_no_other_file_lists_the_methods():
    names = "|".join([*methods.METHODS, *methods.ALIASES])
    pair = re.compile(rf"[(\[{{]\s*[\"']({names})[\"']\s*,\s*[\"']({names})[\"']")
    assert pair.search('METHODS = ("fused", "portable")')
    for name, path in sources().items():
        if name != "jax_iser.methods":
            assert not pair.search(path.read_text()), path


def test_the_scheme_of_old_means_a_method():
    make = functools.partial(MoE, 8, 12, num_experts=4, top_k=2)
    with pytest.warns(DeprecationWarning, match='use method="dense"'):
        assert make(reference_scheme="dense", rngs=nnx.Rngs(0)).method == "dense"
    with pytest.warns(DeprecationWarning, match="leave it out"):
        assert make(reference_scheme="blocked", rngs=nnx.Rngs(0)).method == "portable"


def test_references_are_numpy_alone():
    for path in (ROOT / "jax_iser" / "reference").glob("*.py"):
        for module, _ in imports(ast.parse(path.read_text())):
            assert module.split(".")[0] not in ("jax", "jaxlib", "flax"), path
            assert not module.startswith(("jax_iser.methods", "jax_iser.layer")), path


def test_jax_names_of_the_references_warn():
    from jax_iser.reference import fused_moe as twin

    with pytest.warns(DeprecationWarning, match=r"fused_moe\.fused_moe has moved: import it from"):
        moved = twin.fused_moe
    assert moved.__module__ == "jax_iser.methods.portable.fused_moe"
    with pytest.raises(AttributeError, match="no_such_name"):
        twin.no_such_name  # noqa: B018
