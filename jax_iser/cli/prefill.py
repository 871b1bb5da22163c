"""Reads text with a trained MoE language model over expert-parallel ranks on this machine's GPUs or
CPU, and rebalances every MoE layer as it runs. Each rank reads sequences of its own; every chunk
goes through three arms in turn: off (no balancing), on (HALO-Q) and fb (forced balanced routing:
the time a perfectly balanced layer takes; its outputs mean nothing)."""

from __future__ import annotations

import argparse
import contextlib

from jax_iser.cli import _devices, _model
from jax_iser.cli._output import (
    Failure,
    UsageError,
    progress_console,
    result_console,
    write_json,
)
from jax_iser.cli._prefill_options import add_arguments, check
from jax_iser.methods import find_method

__all__ = ["EXAMPLE", "add_arguments", "run"]

_SIZE_NAMES = ("hidden_size", "intermediate_size")
_KINDS = {"cpu": "CPU devices", "gpu": "GPUs"}
EXAMPLE = "jax-iser prefill --text README.md docs/*.md --chunks 2 --plot prefill.png --json -"


def run(args: argparse.Namespace) -> int:
    _choose_devices(args)
    num_devices = check(args)
    path = _model.model_directory(args)
    if args.platform == "cpu":
        _devices.force_devices(
            num_devices // (args.num_processes or 1),
            f"--ep {args.ep} with --ranks-per-device {args.ranks_per_device}",
        )
    if args.coordinator:
        _devices.join_processes(args.coordinator, args.num_processes, args.process_id)
    is_first = not args.process_id
    config = _model.load_config(path)
    _choose_dtypes(args, path, config)
    domain_config = _domain_config(args, config)
    inputs, targets, text = _read_text(args)
    mesh = _devices.make_mesh(num_devices, args.platform)
    dtypes = {"dtype": args.dtype, "weight_dtype": args.weight_dtype}
    model = _model.load_model(path, mesh=mesh, method=args.method, **dtypes)
    console = progress_console()
    if is_first:
        _introduce(console, args, path, domain_config, inputs, text)
    measurement = _measure(args, model, mesh, domain_config, inputs, targets, console, is_first)
    return _report(args, path, config, measurement) if is_first else _exit_code(measurement)


def _choose_devices(args) -> None:
    """Settles `--platform` and `--ranks-per-device` where they were left open."""
    if args.coordinator and args.platform == "gpu":
        raise UsageError("--platform gpu with --coordinator: one process reads on all GPUs")
    num_gpus = 0 if args.coordinator else _devices.count_gpus(args.platform, args.method)
    args.platform = "gpu" if num_gpus else "cpu"
    if args.ranks_per_device is None:
        shares = [n for n in range(1, num_gpus + 1) if args.ep % n == 0]
        args.ranks_per_device = args.ep // shares[-1] if shares else 1


def _choose_dtypes(args, path, config) -> None:
    """Settles `--weight-dtype` where it was left open, and the dtype that the model runs in."""
    from jax_iser.experts.formats import float8_block128 as fp8

    if args.weight_dtype is not None:
        try:
            fp8.check_sizes(config.hidden_size, config.intermediate_size, *_SIZE_NAMES)
        except ValueError as error:
            raise UsageError(
                f"--weight-dtype {args.weight_dtype}: {path}: {error}, or leave the option out"
            ) from error
    else:
        args.weight_dtype = _model.stored_weight_dtype(path)
    # GPUs take FP8 with bf16 tokens alone.
    args.dtype = "float32" if args.weight_dtype is None else "bfloat16"


def _domain_config(args, config):
    """The sizes of the Domain; also what the reference plans with."""
    from jax_iser.domain import DomainConfig

    try:
        return DomainConfig(
            num_ranks=args.ep,
            ranks_per_device=args.ranks_per_device,
            num_experts=config.num_experts,
            top_k=config.top_k,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            max_tokens_per_rank=args.tokens_per_rank,
            num_helper_slots=args.slots,
            num_layers=config.num_layers,
            dtype=args.dtype,
            weight_dtype=args.weight_dtype,
            min_group_size=args.min_group_size,
            platform="cuda" if args.platform == "gpu" else "cpu",
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _read_text(args):
    """`[chunks, sequences, length] i32` inputs and next-byte targets, and what was read.

    The sequences of a chunk come rank by rank.
    """
    from jax_iser.models.data import sequences

    chunk = args.ep * args.tokens_per_rank
    if args.text:
        stream, text = _model.read_files(args.text), ", ".join(args.text)
    else:
        stream, text = _model.read_standard_library(args.chunks * chunk + 1)
    chunks = min((len(stream) - 1) // chunk, args.chunks)
    if chunks < 1:
        raise UsageError(
            f"the text has {len(stream)} bytes with separators, but a chunk takes {chunk + 1} "
            f"(--ep {args.ep} x --tokens-per-rank {args.tokens_per_rank}, and one target); give "
            "more text or lower one of them"
        )
    shape = (chunks, -1, args.sequence_length)
    inputs, targets = sequences(stream[: chunks * chunk + 1], args.sequence_length)
    return inputs.reshape(shape), targets.reshape(shape), text


def _introduce(console, args, path, domain_config, inputs, text) -> None:
    from jax_iser.domain import describe

    console.print(f"model: {path}\ntext: {inputs.size:,} bytes in {len(inputs)} chunks: {text}")
    ranks = f"{args.ep} ranks on {args.ep // args.ranks_per_device} {_KINDS[args.platform]}"
    if find_method(args.method).needs_domain:
        size = describe(domain_config, args.num_processes or 1)["bytes_total"]
        ranks += f", {size / 2**20:.1f} MiB of symmetric memory"
    weights = "" if args.weight_dtype is None else f", experts in {args.weight_dtype}"
    console.print(f"{ranks}, method {args.method}{weights}")


def _measure(args, model, mesh, config, inputs, targets, console, is_first):
    from jax.errors import JaxRuntimeError

    from jax_iser import Domain, IserError
    from jax_iser.models.data import SEPARATOR
    from jax_iser.prefill import measure, reference_handle

    if not find_method(args.method).needs_domain:
        context = contextlib.nullcontext(reference_handle(mesh, "ep", config))
    else:
        context = _open_domain(Domain, mesh, config)
    try:
        with context as domain, _progress(console, args, len(inputs), is_first) as progress:
            return measure(
                model,
                domain,
                inputs,
                targets,
                arms=args.arms,
                repeats=args.repeats,
                separator=SEPARATOR,
                progress=progress,
            )
    except (IserError, JaxRuntimeError) as error:
        raise Failure(str(error)) from error


def _open_domain(domain_type, mesh, config):
    import dataclasses

    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del sizes["num_ranks"], sizes["platform"]  # follow from the mesh
    try:
        return domain_type(mesh, "ep", **sizes)
    except (ValueError, OSError, TimeoutError) as error:
        raise Failure(f"no Domain: {error}") from error


@contextlib.contextmanager
def _progress(console, args, num_chunks, is_first):
    """Yields `measure`'s callback, behind a bar on standard error."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not is_first) as bar:
        compiling = bar.add_task("compiling arms", total=len(args.arms))
        runs = num_chunks * args.repeats * len(args.arms)
        running = bar.add_task("reading chunks in each arm", total=runs)
        tasks = {"compile": compiling, "run": running}

        def advance(arm, stage):
            bar.advance(tasks[stage])
            done = int(bar.tasks[running].completed)
            if not console.is_terminal and stage == "run" and done * 10 % runs < 10:
                console.print(f"{done} of {runs} runs of a chunk")  # a log has no moving bar

        yield advance


def _report(args, path, config, measurement) -> int:
    from jax_iser.cli import _prefill_result, _prefill_views

    result = _prefill_result.summarize(args, path.name, config, measurement)
    out = result_console(args)
    _prefill_views.print_result(out, result)
    if args.plot:
        _prefill_views.plot(result, args.plot)
    if args.record:
        sizes = (config.num_experts, args.ep, args.sequence_length)
        _prefill_result.write_trace(args.record, *sizes, measurement)
    write_json(args.json, result)
    return _exit_code(measurement)


def _exit_code(measurement) -> int:
    if measurement.bitwise_equal is False:
        raise Failure("balancing changed the logits: on and off differ in some bit")
    if not measurement.repeatable:
        raise Failure("repeated runs of one arm differ in some bit of the logits")
    return 0
