"""`jax-iser`: the command line. A command is a module of its own, imported when it is asked for.

It has a docstring and `EXAMPLE` (a line) for its help, `add_arguments(parser)`, `run(args) -> int`.
Exit codes: 0 success, 2 bad usage or input (one line on standard error), 1 failure (likewise).
"""

from __future__ import annotations

import argparse
import importlib
import sys

from jax_iser.cli._output import Failure, UsageError
from jax_iser.errors import MissingExtensionError

COMMANDS = {
    "prefill": "a trained MoE reads text on expert-parallel ranks, rebalanced at every layer",
    "generate": "the same model continues a prompt",
    "plan": "explain one plan: loads before and after, broadcasts, who sends how much to whom",
    "replay": "what balancing would gain on recorded routing",
    "synth": "write made-up routing of a chosen skew as a trace",
    "roofline": "when copying experts pays, from sizes and rates",
    "broadcast": "modelled rates of the ways to copy an expert to a group",
    "doctor": "versions, devices, and which methods work here",
}


class Parser(argparse.ArgumentParser):
    """Usage errors are one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if sys.stdout is None or sys.stderr is None:  # closed by whoever started it
        return 1
    if argv and argv[0] in COMMANDS:
        return _run(argv[0], argv[1:])
    top = Parser(
        prog="jax-iser",
        description="Expert-parallel MoE layers that rebalance themselves at every call.",
        epilog=_list_commands(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=_version())
    top.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    if not argv:
        top.error("name a command: " + ", ".join(COMMANDS))
    top.parse_args(argv)
    return 0


def _list_commands() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        ["commands:", *lines, "", "example:  jax-iser prefill", "more:     jax-iser COMMAND --help"]
    )


def _version() -> str:
    from jax_iser import __version__

    return f"jax-iser {__version__}"


def _run(name: str, argv: list[str]) -> int:
    module = importlib.import_module(f"jax_iser.cli.{name}")
    parser = Parser(
        prog=f"jax-iser {name}",
        description=module.__doc__,
        epilog=f"example:\n  {module.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return module.run(args)
    except UsageError as error:
        code, text = 2, str(error)
    except (Failure, MissingExtensionError) as error:
        code, text = 1, str(error)
    except KeyboardInterrupt:
        code, text = 130, "interrupted"
    except BrokenPipeError:  # a reader such as `head` left
        sys.stderr.close()  # or Python complains again when it flushes standard output at exit
        return 1
    except OSError as error:  # a full disk, say
        code, text = 1, str(error)
    print(f"{parser.prog}: error: {' '.join(text.split())}", file=sys.stderr)
    return code
