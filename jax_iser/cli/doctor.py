"""Says what works on this machine and why the rest does not: versions, devices, methods, fabrics.
Methods are tried, not guessed: a small layer runs through each."""

from __future__ import annotations

import argparse

from jax_iser.cli import _probes
from jax_iser.cli._output import (
    add_json_argument,
    check_writable,
    progress_console,
    result_console,
    write_json,
)

EXAMPLE = "jax-iser doctor --json -"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    check_writable("--json", args.json)
    progress_console().print("running a small layer through each method ...")
    result = examine()
    _print(result_console(args), result)
    write_json(args.json, result)
    return 0 if result["ok"] else 1


def examine() -> dict:
    """All findings; docs/cli.md describes the keys.

    `ok`: what should work on every machine does, the reference and the fused method on the CPU.
    """
    cuda = _probes.cuda()
    fused, unicast = _probes.try_fused("cpu")
    plain_cuda, tensor_cuda, unicast_cuda = _probes.try_cuda(cuda)
    reference = _probes.verdict(_probes.run_reference)
    return {
        "ok": reference["works"] and fused["works"] and unicast["works"],
        "versions": _probes.versions(),
        "system": _probes.system(),
        "devices": _probes.attempt(_probes.devices),
        "cuda": cuda,
        "methods": {
            "reference": reference,
            "fused on cpu": fused,
            "fused on cuda": plain_cuda,
            "fused on tensor cores": tensor_cuda,
        },
        "fabrics": {
            "unicast on cpu": unicast,
            "across processes on cpu": _probes.verdict(_probes.share_memory),
            "unicast on cuda": unicast_cuda,
            "multicast": _probes.multicast(),
        },
    }


def _print(console, result: dict) -> None:
    for title in ("versions", "system", "cuda"):
        console.print(title, style="bold")
        for name, value in result[title].items():
            console.print(f"  {name:<14} {_in_words(value)}", markup=False)
    console.print("devices", style="bold")
    for device in result["devices"]:
        console.print(f"  {device}", markup=False)
    for title in ("methods", "fabrics"):
        console.print(title, style="bold")
        for name, found in result[title].items():
            word = "works" if found["works"] else "no"
            console.print(f"  {name:<24} {word:<6} {found['why']}", markup=False)
    if not result["ok"]:
        console.print("what should work on every machine does not: see the lines above")


def _in_words(value) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return {None: "none", True: "yes", False: "no"}.get(value, str(value))
