"""How the parts of the package stand on one another: imports go down, and core on nothing."""

import ast
import graphlib
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import jax_iser
from jax_iser import _moved

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What may be included in ffi/core: the standard library, core itself, and what a compiler brings.
FOREIGN = re.compile(r"xla/|nanobind|Python\.h|cuda|ffi/(cpu|cuda|bindings)/", re.IGNORECASE)


def sources() -> dict[str, pathlib.Path]:
    """Modules of the package by name; models/ is jax_iser.models."""
    found = {}
    for folder, package in (("jax_iser", "jax_iser"), ("models", "jax_iser.models")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            if folder == "jax_iser" and inside.parts[0] == "models":  # a link to models/
                continue
            parts = [package, *inside.with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_type_checking(node) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(tree: ast.AST, package: str = ""):
    """Names that a module imports, at its top or in its functions: `(module, name or None)`."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            for other in node.orelse:
                yield from imports(ast.Module([other], []), package)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield from ((module, alias.name) for alias in node.names)
        else:
            yield from imports(node, package)


def edges(name: str, text: str, modules) -> set[str]:
    """Modules of the package that importing `name`, or calling into it, imports."""
    found = set()
    is_package = any(each.startswith(f"{name}.") for each in modules)
    package = name if is_package else name.rpartition(".")[0]
    for module, attribute in imports(ast.parse(text), package):
        target = f"{module}.{attribute}"
        if module == "jax_iser" and attribute in jax_iser.PUBLIC:
            target = jax_iser.PUBLIC[attribute]
        elif attribute is None or target not in modules:
            target = module
        # A module's packages are imported before it; the importer's own are there already.
        parts = target.split(".")
        found |= {".".join(parts[: i + 1]) for i in range(len(parts))}
    own = {name} if name in found else set()
    return {each for each in found & set(modules) if not f"{name}.".startswith(f"{each}.")} | own


def circle_in(texts: dict[str, str]) -> list[str]:
    graph = {name: edges(name, text, texts) - {name} for name, text in texts.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def texts_of_sources() -> dict[str, str]:
    return {name: path.read_text() for name, path in sources().items()}


def test_no_imports_go_in_a_circle():
    assert not circle_in(texts_of_sources())


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("jax_iser.plan.knobs", "from jax_iser.domain.config import DomainConfig"),
        ("jax_iser.plan.knobs", "def f():\n    from jax_iser import moe_layer"),
        ("jax_iser.domain.config", "if True:\n    import jax_iser.domain.options"),
        ("jax_iser.errors", "from jax_iser import domain"),
        ("jax_iser.models.lm", "from .generate import stream"),
    ],
)
def test_a_circle_is_found(module, line):
    texts = texts_of_sources()
    texts[module] += f"\n{line}\n"
    assert module in circle_in(texts)


def test_imports_for_types_alone_make_no_circle():
    texts = texts_of_sources()
    line = "if TYPE_CHECKING:\n    from jax_iser.domain import DomainConfig\n"
    texts["jax_iser.plan.knobs"] += line
    assert not circle_in(texts)


def foreign_includes(text: str) -> list[str]:
    found = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)
    return [name for name in found if FOREIGN.search(name)]


def test_core_stands_alone():
    files = [path for path in (ROOT / "ffi" / "core").rglob("*") if path.suffix in (".h", ".cc")]
    assert files
    for path in files:
        assert not foreign_includes(path.read_text()), path


@pytest.mark.parametrize(
    "name", ["xla/ffi/api/ffi.h", "nanobind/nanobind.h", "cuda_runtime.h", "ffi/cpu/domain.h"]
)
def test_a_foreign_include_is_found(name):
    for line in (f"#include <{name}>", f'  # include "{name}"'):
        assert foreign_includes(f"#pragma once\n{line}\n") == [name]


def test_public_names_are_those_that_types_are_checked_with():
    tree = ast.parse((ROOT / "jax_iser" / "__init__.py").read_text())
    block = next(node for node in tree.body if is_type_checking(node))
    checked = {alias.asname: node.module for node in block.body for alias in node.names}
    assert checked == jax_iser.PUBLIC


def test_public_names_are_not_hidden_by_modules_of_the_same_name():
    code = """
from jax_iser.plan import Plan
import jax_iser.shared_expert
import jax_iser
assert "jax_iser.plan" in __import__("sys").modules
print(*(type(getattr(jax_iser, name)).__name__ for name in ("plan", "shared_expert", "fused_moe")))
assert jax_iser.nnx.MoE
"""
    assert run_python(code) == "function function function"


def run_python(code: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_old_names_of_modules_work_with_a_warning():
    code = """
import importlib, json, warnings
from jax_iser._moved import MOVED
warned = {}
for old, homes in MOVED.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
        for home in map(importlib.import_module, homes):
            for each in vars(home):
                if not each.startswith("__"):
                    getattr(module, each)
    assert not hasattr(module, "no_such_name")
    warned[old] = [w.category.__name__ for w in caught if old in str(w.message)]
print(json.dumps(warned))
"""
    assert json.loads(run_python(code)) == {old: ["DeprecationWarning"] for old in _moved.MOVED}


def test_the_project_uses_no_old_names():
    paths = [*sources().values(), *(ROOT / "tests").rglob("*.py"), *ROOT.glob("benchmarks/**/*.py")]
    paths += [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    public = {f"jax_iser.{name}" for name in jax_iser.PUBLIC}  # functions of the same name
    old = "|".join(map(re.escape, sorted(set(_moved.MOVED) - public)))
    packages = {name.rpartition(".")[0] for name in _moved.MOVED}
    for path in paths:
        if path.name in ("_moved.py", pathlib.Path(__file__).name):
            continue
        text = path.read_text()
        assert not re.search(rf"(?<![\w.])({old})\b(?!\.py)", text), path
        if path.suffix == ".py":
            for module, attribute in imports(ast.parse(text)):
                assert module not in _moved.MOVED, path
                found = f"{module}.{attribute}"
                assert module not in packages or found not in set(_moved.MOVED) - public, path


WITHOUT_EXTENSION = """
import sys
sys.modules["jax_iser._iser"] = sys.modules["jax_iser._iser_cuda"] = None
import numpy as np, jax, jax.numpy as jnp
import jax_iser
"""


def test_without_the_extension_plain_jax_works():
    code = """
from flax import nnx
from jax_iser.nnx import MoE
moe = MoE(8, 8, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
y = moe(jnp.ones((4, 8)))
config = jax_iser.DomainConfig(
    num_ranks=4, num_experts=8, top_k=2, hidden_size=16, intermediate_size=32,
    max_tokens_per_rank=8,
)
print(y.shape, bool(jnp.isfinite(y).all()), config.num_home, jax_iser.moe_layer.__name__)
"""
    assert run_python(WITHOUT_EXTENSION + code) == "(4, 8) True 2 moe_layer"


def command(*words: str, without: bool) -> dict:
    """The JSON that a command prints, whatever its exit code."""
    code = f"""
from jax_iser.cli import main
main([*{list(words)!r}, "--json", "-"])
"""
    return json.loads(run_python((WITHOUT_EXTENSION if without else "") + code))


def test_without_the_extension_replays_are_the_same():
    words = (
        "replay",
        "workload:W1",
        "--ep",
        "4",
        "--iterations",
        "2",
        "--policy",
        "none,haloq,p2p",
    )
    found = [command(*words, without=without) for without in (False, True)]
    for result in found:
        assert len(result["rows"]) == 3
        for row in result["rows"]:
            del row["plans_per_s"]
    assert found[0]["rows"] == found[1]["rows"]


def test_without_the_extension_doctor_says_what_works():
    found = command("doctor", without=True)["methods"]
    assert found["reference"]["works"], found
    assert not found["fused on cpu"]["works"]
    assert "could not be loaded" in found["fused on cpu"]["why"]


def test_without_the_extension_a_command_that_needs_it_fails_in_one_line(tmp_path):
    path = tmp_path / "counts.npy"
    np.save(path, np.full((4, 8), 3, np.int32))
    code = f"""
from jax_iser.cli import main
print(main(["plan", {str(path)!r}]))
"""
    code = WITHOUT_EXTENSION + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == ["1"]
    assert "docs/building.md" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "use",
    [
        "jax_iser.plan_counts(np.ones((2, 4), np.int32))",
        'jax_iser.Domain(jax.make_mesh((1,), ("ep",)), num_experts=4, top_k=2, hidden_size=16, '
        "intermediate_size=32, max_tokens_per_rank=8)",
    ],
)
def test_without_the_extension_what_needs_it_says_so(use):
    code = f"""
try:
    {use}
except ImportError as error:
    print(error)
"""
    text = run_python(WITHOUT_EXTENSION + code)
    for part in ("could not be loaded", "docs/building.md", 'method="portable"'):
        assert part in text, text
