"""Reads targets.bzl, the one list of C++ and CUDA targets, for the builds that are not Bazel's.

    python3 scripts/targets.py cmake            # the list as CMake's variables
    python3 scripts/targets.py library cuda     # the sources of a library, one per line
    python3 scripts/targets.py programs cpp     # the programs of groups, one source per line

Standard library only.
"""

import argparse
import ast
import pathlib
import platform
from collections.abc import Iterable
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = ROOT / "targets.bzl"


def read(path: pathlib.Path = LIST) -> dict[str, Any]:
    """Name -> value of each assignment. Starlark's literals are Python's."""
    values = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = ast.literal_eval(node.value)
    return values


_LIST = read()
COPTS: list[str] = _LIST["COPTS"]
ISA_COPTS: dict[str, list[str]] = _LIST["ISA_COPTS"]
LIBRARIES: dict[str, dict[str, Any]] = _LIST["LIBRARIES"]
PROGRAMS: dict[str, dict[str, Any]] = _LIST["PROGRAMS"]


class Program(NamedTuple):
    """One program: paths below the root, flags of its own, and what it is called with."""

    name: str
    sources: list[str]
    copts: list[str]
    args: list[str]


def files(patterns: Iterable[str], exclude: Iterable[str] = ()) -> list[str]:
    """What is there, as paths below the root."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    found -= {path for pattern in exclude for path in ROOT.glob(pattern)}
    return sorted(str(path.relative_to(ROOT)) for path in found)


def closure(names: Iterable[str]) -> list[str]:
    """The libraries named and all that they stand on."""
    ordered: dict[str, None] = {}
    for name in names:
        ordered |= dict.fromkeys([*closure(LIBRARIES[name].get("deps", [])), name])
    return list(ordered)


def library_files(name: str, kind: str) -> list[str]:
    """The `srcs` or `hdrs` of one library, without those of its deps."""
    library = LIBRARIES[name]
    return files(library.get(kind, []), library.get("exclude", []))


def host_sources(names: Iterable[str]) -> list[str]:
    """All that a program over these libraries is linked from."""
    return sorted({path for name in closure(names) for path in library_files(name, "srcs")})


def isa_copts(source: str, machine: str = platform.machine()) -> list[str]:
    """What this source may use beyond the baseline of `machine`."""
    if machine not in ("x86_64", "AMD64"):
        return []
    return [flag for end, flags in ISA_COPTS.items() if source.endswith(end) for flag in flags]


def group_copts(group: str) -> list[str]:
    """The standard, folders of headers, and flags of a group's own sources."""
    values = PROGRAMS[group]
    includes = [f"-I{folder}" for folder in values.get("includes", [])]
    return [f"-std=c++{values.get('std', 17)}", *includes, "-I.", *values.get("copts", [])]


def programs(group: str) -> list[Program]:
    values = PROGRAMS[group]
    shared, copts = files(values.get("with", [])), group_copts(group)
    return [
        Program(pathlib.Path(path).stem, [path, *shared], copts, values.get("args", []))
        for path in files(values["srcs"])
    ]


def cmake_variables() -> list[str]:
    """ISER_<list>_<name>_<field>, each a list of CMake's."""

    def line(name: str, value: Any) -> str:
        items = value if isinstance(value, list | dict) else [str(value)]
        return f'set(ISER_{name} "{";".join(items)}")'

    lines = [line("COPTS", COPTS), line("ISA_COPTS", ISA_COPTS), line("PROGRAMS", PROGRAMS)]
    lines += [line(f"ISA_COPTS_{end}", flags) for end, flags in ISA_COPTS.items()]
    for kind, targets in (("LIBRARY", LIBRARIES), ("PROGRAM", PROGRAMS)):
        for name, fields in targets.items():
            lines += [line(f"{kind}_{name}_{field}", each) for field, each in fields.items()]
    return lines


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cmake")
    commands.add_parser("library").add_argument("name", choices=list(LIBRARIES))
    commands.add_parser("programs").add_argument("names", choices=list(PROGRAMS), nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "cmake":
        lines = cmake_variables()
    elif arguments.command == "library":
        lines = library_files(arguments.name, "srcs")
    else:
        lines = [path for name in arguments.names for path in files(PROGRAMS[name]["srcs"])]
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
