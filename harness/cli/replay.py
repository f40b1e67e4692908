"""Command `replay`."""

import asyncio
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rollstream.harness.cli.shared_options import BOOTSTRAP_SERVERS, RUN, TRUST, WORKSPACE
from rollstream.harness.services.live_line import LiveLine
from rollstream.harness.services.liveness import PARENT, die_with_parent
from rollstream.harness.services.optional_dependencies import skip_unused_libraries
from rollstream.harness.services.serving import CLI
from rollstream.harness.services.workspace import EMBEDDED, Workspace
from rollstream.schemas.errors import ConfigError, RollstreamError

if TYPE_CHECKING:
    from rollstream.harness.replays.run import ReplayRequest
    from rollstream.harness.replays.what_if import WhatIfOutcome
    from rollstream.replay.report import Report
    from rollstream.schemas.kafka import KafkaSettings

T = TypeVar("T")

SHOWN = 20
"""Maximum number of differences printed one by one."""


@click.command()
@RUN
@click.option("--verify", is_flag=True, help="Fold every stage again and compare all digests.")
@click.option("--train", is_flag=True, help="Train the recorded batches again and compare all weight versions.")
@click.option(
    "--what-if",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Train on the recorded rollouts as a new run of this workspace, with the settings in this YAML file.",
)
@click.option("--epoch", type=click.IntRange(min=0), help="One epoch only (with --verify or --train).")
@click.option("--steps", metavar="A:B", help="Versions A to B only (with --train); A or B may be left out.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Processes for --verify.")
@click.option(
    "--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that --train in together."
)
@click.option("--any-libraries", is_flag=True, help="Train again even if library versions differ.")
@click.option(
    "--export",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Read this export instead of the topics. A what-if does not need the run in the workspace.",
)
@TRUST
@BOOTSTRAP_SERVERS
@WORKSPACE
def replay(
    run: str,
    verify: bool,
    train: bool,
    what_if: Path | None,
    epoch: int | None,
    steps: str | None,
    workers: int,
    ranks: int,
    any_libraries: bool,
    export: Path | None,
    trust: bool,
    bootstrap_servers: str | None,
    workspace: Path,
) -> None:
    """Replay a run and compare its results, or run a what-if.

    The exit status is 1 if a result is not identical. --verify and --train write nothing.
    """
    from rollstream.harness.replays.run import ReplayRequest
    from rollstream.replay.source import check_export

    if ranks > 1 and not train:
        raise ConfigError("--ranks is the number of processes for --train; add --train")
    if export is not None:
        check_export(export, run)
    if what_if is not None:
        _check_alone(verify or train, epoch is not None or steps is not None)
        _what_if(run, what_if, export, Workspace(workspace), bootstrap_servers, trust=trust)
        return
    if not verify and not train:
        raise ConfigError("nothing to replay; give --verify, --train or both, or --what-if FILE")
    if steps is not None and not train:
        raise ConfigError("--steps selects versions for --train; add --train")
    first, last = _range(steps)
    request = ReplayRequest(run, verify, train, epoch, first, last, workers, any_libraries, trust)
    compare = partial(_compare, export=export, layout=Workspace(workspace), bootstrap_servers=bootstrap_servers)
    report = _in_ranks(ranks, request, compare) if ranks > 1 else compare(request)
    if report is not None and report.differences:
        sys.exit(1)


def _compare(
    request: "ReplayRequest", *, export: Path | None, layout: Workspace, bootstrap_servers: str | None
) -> "Report":
    """Replay, and print the result."""
    from rollstream.harness.replays.run import replay_run
    from rollstream.harness.services.workspace import broker_of
    from rollstream.replay.source import Source

    began = time.monotonic()
    learner = threading.Thread(target=_load_learner, daemon=True)
    if request.train:
        learner.start()
    try:
        with ExitStack() as held, _progress_line() as line:
            source = Source(export=export)
            if export is None:
                source = Source(held.enter_context(broker_of(layout, bootstrap_servers)))
            report = asyncio.run(replay_run(source, layout, request, line.show, line.print, learner.join))
            line.clear()
            _conclude(request.run_id, report, time.monotonic() - began)
        if report.error is not None:
            raise report.error
    finally:
        if request.train:
            learner.join()  # torch prints a traceback if Python ends while it is imported
    return report


def _in_ranks(num: int, request: "ReplayRequest", compare: "Callable[[ReplayRequest], Report]") -> "Report | None":
    """Replay in so many processes, which this command is started in again: the first one reads, compares and prints.

    The report is in that one alone. Exits with its status; raises RunFailedError if another process fails.
    """
    from rollstream.learner.parallel.launch import ProcessFailedError, is_started_together, start_processes

    if not is_started_together():
        os.environ[PARENT] = str(os.getpid())
        try:
            if not start_processes(num, CLI, sys.argv[1:]):
                raise KeyboardInterrupt
        except ProcessFailedError as error:
            if error.rank > 0 or error.status < 0:
                raise
            sys.exit(error.status)
        return None
    die_with_parent(os.environ)
    os.environ.pop(PARENT, None)  # this one's own children have another
    skip_unused_libraries()
    from rollstream.learner.parallel.process_ranks import END, joined
    from rollstream.learner.retrain import take_part

    with joined() as ranks:
        if ranks.num != num:
            raise ConfigError(f"--ranks {num}: torchrun has started {ranks.num} processes; give --ranks {ranks.num}")
        if ranks.index:
            take_part(ranks)
            return None
        try:
            report = compare(replace(request, ranks=ranks))
        except (RollstreamError, OSError):  # on others torchrun ends the processes, which may still compute
            if not ranks.is_stuck:
                ranks.send(END)
            raise
        ranks.send(END)
        return report


def _load_learner() -> None:
    """Import torch and the learner while the broker starts and the log is read; each takes seconds."""
    with suppress(ImportError):  # reported where it is imported for use
        skip_unused_libraries()
        importlib.import_module("rollstream.replay.training")


def _check_alone(is_compared: bool, is_part: bool) -> None:
    """Raises ConfigError for options that cannot be combined with a what-if."""
    if is_compared:
        raise ConfigError(
            "--what-if trains a new run and cannot be combined with --verify or --train; use them on "
            "the new run afterwards"
        )
    if is_part:
        raise ConfigError(
            "--what-if replays a whole run, because every epoch continues from the weights of the previous one; "
            "remove --epoch and --steps; `finetuning: {num_epochs: N}` in its FILE keeps the first N epochs"
        )


def _what_if(
    run: str, file: Path, export: Path | None, layout: Workspace, bootstrap_servers: str | None, *, trust: bool
) -> None:
    from rollstream.harness.replays.run import what_if_run
    from rollstream.harness.services.workspace import broker_of, embedded_broker

    skip_unused_libraries()
    is_embedded = (bootstrap_servers or layout.remembered_broker()) == EMBEDDED
    with ExitStack() as held, _progress_line() as line:
        if export is not None:
            layout.create()
        if is_embedded and layout.folder.is_dir():
            held.enter_context(layout.in_use("what-if"))  # a running learner would claim the job
        if is_embedded and export is not None:
            kafka, _ = held.enter_context(embedded_broker(layout))
        else:
            kafka = held.enter_context(broker_of(layout, bootstrap_servers))
        outcome = run_in_order(what_if_run(kafka, layout, run, file, line.show, line.print, export=export, trust=trust))
        if is_embedded:
            _project(kafka, layout, line)
        line.clear()
        _print_outcome(outcome)


def run_in_order(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; SIGTERM and SIGHUP (unless ignored) cancel it as Ctrl-C does, so that it cleans up.

    Raises KeyboardInterrupt then. Raising it in the signal handler could end a task that the clean-up still needs.
    """

    async def go() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(go())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _print_outcome(outcome: "WhatIfOutcome") -> None:
    left_out = ", ".join(f"{number} {cause}" for cause, number in sorted(outcome.rejected.items())) or "none"
    click.echo(f"what-if {outcome.run_id}: {outcome.num_batches} batches; trajectories left out: {left_out}")
    for name in sorted(outcome.recorded.keys() | outcome.trained.keys()):
        before, now = outcome.recorded.get(name), outcome.trained.get(name)
        click.echo(f"  {name:16} recorded {_number(before)}  what-if {_number(now)}")


def _project(kafka: "KafkaSettings", layout: Workspace, line: LiveLine) -> None:
    """Project the new run for `rollstream sql`; a failure to do so does not fail the what-if."""
    from rollstream.harness.replays.run import project
    from rollstream.replay.source import Source

    line.show("bringing the metrics up to date")
    try:
        run_in_order(project(Source(kafka), layout))
    except RollstreamError as error:
        line.print(f"this run is missing from the metrics: {error}; run `rollstream rebuild`")


def _number(value: float | None) -> str:
    return "      -" if value is None else f"{value:7.4f}"


def _conclude(run: str, report: "Report", seconds: float) -> None:
    counted = ", ".join(f"{number:,} {what}" for what, number in report.counts.items()) or "nothing"
    if not report.differences:
        click.echo(f"{report.verdict}: run {run}: {counted}, in {seconds:.1f} s")
        if report.unended:
            click.echo(report.unended, err=True)
        return
    for difference in report.differences[:SHOWN]:
        click.echo(f"different: {difference}", err=True)
    left = len(report.differences) - SHOWN
    if left > 0:
        click.echo(f"... and {left} more", err=True)
    click.echo(f"{report.verdict}: run {run}: {len(report.differences)} differences; compared {counted}", err=True)


def _range(steps: str | None) -> tuple[int | None, int | None]:
    if steps is None:
        return None, None
    first, colon, last = steps.partition(":")
    try:
        found = int(first) if first else None, int(last) if last else None
    except ValueError:
        found, colon = (None, None), ""
    if not colon or (found[0] is not None and found[1] is not None and found[0] > found[1]):
        raise ConfigError(f"--steps {steps}: give two versions as A:B, with A not above B")
    return found


@contextmanager
def _progress_line() -> Iterator[LiveLine]:
    """Progress on stderr in one line on a terminal, cleared before an error is shown; nothing if stderr is not a
    terminal."""
    line = LiveLine(sys.stderr, is_live_only=True)
    try:
        yield line
    finally:
        line.clear()
