"""Command `replay`."""

import asyncio
import importlib
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rollstream.harness.commands.serve import BOOTSTRAP_SERVERS, WORKSPACE
from rollstream.harness.workspace import EMBEDDED, Workspace
from rollstream.schemas.errors import ConfigError, RollstreamError

if TYPE_CHECKING:
    from rollstream.harness.replay.report import Report
    from rollstream.harness.replay.what_if import Outcome

T = TypeVar("T")

SHOWN = 20
"""Differences that are told one by one."""


@click.command()
@click.argument("run")
@click.option("--verify", is_flag=True, help="Fold every stage again and compare every digest.")
@click.option("--train", is_flag=True, help="Train the recorded batches again and compare every version.")
@click.option(
    "--what-if",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Train the recorded rollouts again, as a new run of this workspace, with the settings that this YAML changes.",
)
@click.option("--epoch", type=click.IntRange(min=0), help="One epoch only (with --verify or --train).")
@click.option("--steps", metavar="A:B", help="Versions A to B only (with --train); A or B may be left out.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Processes for --verify.")
@click.option("--any-libraries", is_flag=True, help="Train again although library versions differ.")
@click.option(
    "--export",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Read this export, not the topics. For a what-if the workspace need not know the run.",
)
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
    any_libraries: bool,
    export: Path | None,
    bootstrap_servers: str | None,
    workspace: Path,
) -> None:
    """Replay a run and say whether it comes out equal (exit status 1 if it does not), or what would have been.

    --verify and --train write nothing.
    """
    from rollstream.harness.replay.run import Request, replay_run
    from rollstream.harness.replay.source import Source, check_export
    from rollstream.harness.workspace import broker_of

    if export is not None:
        check_export(export, run)
    if what_if is not None:
        _check_alone(verify or train, epoch is not None or steps is not None)
        _what_if(run, what_if, export, Workspace(workspace), bootstrap_servers)
        return
    if not verify and not train:
        raise ConfigError("say what to replay: --verify, --train or both, or --what-if FILE")
    if steps is not None and not train:
        raise ConfigError("--steps says which versions to train again: give --train with it")
    first, last = _range(steps)
    request = Request(run, verify, train, epoch, first, last, workers, any_libraries)
    place = Workspace(workspace)
    began = time.monotonic()
    if train:
        threading.Thread(target=_load_learner, daemon=True).start()
    with ExitStack() as held:
        source = Source(export=export)
        if export is None:
            source = Source(held.enter_context(broker_of(place, bootstrap_servers)))
        report = asyncio.run(replay_run(source, place, request, _tell))
        _tell("")
        _conclude(run, report, time.monotonic() - began)
    if report.differences:
        sys.exit(1)


def _load_learner() -> None:
    """Import torch and all that training needs while the broker starts and the log is read: seconds each."""
    with suppress(ImportError):  # told where it is imported for use
        importlib.import_module("rollstream.harness.replay.train")


def _check_alone(is_compared: bool, is_part: bool) -> None:
    """Raises ConfigError for what a what-if cannot be asked for together with."""
    if is_compared:
        raise ConfigError("--what-if trains a run of its own: give it alone, then --verify or --train that run")
    if is_part:
        raise ConfigError(
            "--what-if is of a whole run, because every epoch trains the weights that the ones before it left: give it "
            "without --epoch and --steps; `finetuning: {num_epochs: N}` in its FILE keeps the first N epochs"
        )


def _what_if(run: str, file: Path, export: Path | None, place: Workspace, bootstrap_servers: str | None) -> None:
    from rollstream.harness.replay.run import what_if_run
    from rollstream.harness.workspace import broker_of, embedded_broker

    is_embedded = (bootstrap_servers or place.remembered_broker()) == EMBEDDED
    with ExitStack() as held:
        if export is not None:
            place.create()
        if is_embedded and place.folder.is_dir():
            held.enter_context(place.in_use("what-if"))  # a run's learner would take the job away
        if is_embedded and export is not None:
            address, _ = held.enter_context(embedded_broker(place))
        else:
            address = held.enter_context(broker_of(place, bootstrap_servers))
        outcome = run_in_order(what_if_run(address, place, run, file, _tell, export=export))
        if is_embedded:
            _project(address, place)
        _tell("")
        _tell_outcome(outcome)


def run_in_order(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`. SIGTERM and SIGHUP (unless ignored) cancel it as Ctrl-C does, so that what it began it ends in order.

    Raises KeyboardInterrupt then. A signal that raised it in the middle of any task could end one that is needed yet.
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


def _tell_outcome(outcome: "Outcome") -> None:
    left_out = ", ".join(f"{number} {cause}" for cause, number in sorted(outcome.rejected.items())) or "none"
    click.echo(f"what-if {outcome.run_id}: {outcome.num_batches} batches; trajectories left out: {left_out}")
    for name in sorted(outcome.recorded.keys() | outcome.trained.keys()):
        before, now = outcome.recorded.get(name), outcome.trained.get(name)
        click.echo(f"  {name:16} recorded {_number(before)}  what-if {_number(now)}")


def _project(address: str, place: Workspace) -> None:
    """Let `rollstream sql` show what was trained; what stands in the way is no failure of that."""
    from rollstream.harness.replay.run import project

    _tell("bringing the metrics up to date")
    try:
        run_in_order(project(address, place))
    except RollstreamError as error:
        _tell("")
        click.echo(f"the metrics lack this run: {error}; `rollstream rebuild` makes them again", err=True)


def _number(value: float | None) -> str:
    return "      -" if value is None else f"{value:7.4f}"


def _conclude(run: str, report: "Report", seconds: float) -> None:
    counted = ", ".join(f"{number:,} {what}" for what, number in report.counts.items()) or "nothing"
    if not report.differences:
        click.echo(f"equal: run {run}: {counted}, in {seconds:.1f} s")
        return
    for difference in report.differences[:SHOWN]:
        click.echo(f"different: {difference}", err=True)
    left = len(report.differences) - SHOWN
    if left > 0:
        click.echo(f"... and {left} more", err=True)
    click.echo(f"NOT equal: run {run}: {len(report.differences)} differences; compared {counted}", err=True)


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


def _tell(line: str) -> None:
    """Progress in one line on a terminal; nothing in a pipe."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{line}", nl=False, err=True)
