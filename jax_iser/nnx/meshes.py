"""The mesh of a module: the one it was given, or that of `jax.set_mesh`; Auto and Explicit axes."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def ambient_mesh() -> Mesh | AbstractMesh | None:
    """The mesh of `jax.set_mesh`, abstract in a traced program; None where there is none.

    Inside `shard_map`, whose axes are manual, there is none that a module could map over.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types:
        return None
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # a program is being traced
        return mesh


def check_mesh(mesh, axis, is_ambient) -> None:
    """Raises TypeError or ValueError, with the remedy, for a mesh without the axis."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"mesh is a {type(mesh).__name__}, expected a jax.sharding.Mesh or None")
    if axis not in mesh.shape:
        whose = "the mesh of jax.set_mesh" if is_ambient else "mesh"
        raise ValueError(
            f'{whose} has axes {tuple(mesh.axis_names)}, none named axis="{axis}"; pass axis= with '
            "the name of the expert-parallel one" + ", or pass mesh=" * is_ambient
        )


def check_context(mesh, name) -> None:
    """Raises ValueError where `jax.set_mesh`, or a `shard_map`, is of another mesh than `mesh`."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty:
        return
    if AxisType.Manual in context.axis_types:
        raise ValueError(
            f"{name} is called inside shard_map over {context.axis_names}, and maps over its mesh "
            "itself; call it outside, or call jax_iser.moe_layer there"
        )
    if dict(context.shape) != dict(mesh.shape):
        raise ValueError(
            f"{name} was made for the mesh {dict(mesh.shape)}, and is called under jax.set_mesh of "
            f"{dict(context.shape)}; make it under that (mesh=None takes it), or call it outside"
        )


def on_mesh(function, mesh, out_specs):
    """`function` on operands that lie anyhow on `mesh`: Explicit axes are Auto ones within.

    Args:
      function: called as `function(mesh, *operands)`, with the mesh that its `shard_map` needs.
      mesh: the module's.
      out_specs: `PartitionSpec`s of its results, which Explicit meshes have in their types.
    """
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and context != getattr(mesh, "abstract_mesh", mesh):
        mesh = context  # of the same axes (check_context), of other types
    explicit = tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    )
    if not explicit:
        return lambda *operands: function(mesh, *operands)
    return jax.sharding.auto_axes(
        lambda *operands: function(None, *operands),
        axes=explicit,
        out_sharding=jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs),
    )


def spec_like(x, mesh, axis) -> P:
    """The spec of a result in `x`'s place: `x`'s own, or its leading dimension over the axis."""
    sharding = jax.typeof(x).sharding
    if dict(sharding.mesh.shape) == dict(mesh.shape):
        return sharding.spec
    is_even = x.ndim > 0 and x.shape[0] % mesh.shape[axis] == 0
    return P(axis) if is_even else P()
