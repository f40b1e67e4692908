"""The command `jobs`: lists training jobs, shows one, cancels one. Options and formatting; the folds do the work."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollstream.harness.cli.shared_options import BOOTSTRAP_SERVERS, WORKSPACE
from rollstream.schemas import ids
from rollstream.schemas.errors import ConfigError

if TYPE_CHECKING:
    from rollstream.eventlog.log import EventLog
    from rollstream.harness.runs.progress import Progress
    from rollstream.learner.shared_model_group import FineTuneJob

CAUSE = "cancelled by `rollstream jobs cancel`"


class ListByDefault(click.Group):
    """A group of commands that passes any argument which is not one of its commands to `list`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_help = bool(args) and args[0] in ctx.help_option_names
        return super().parse_args(ctx, args if is_help else self._completed(args))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, self._completed(args))

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Those of `list`, or a command."""
        return [*self.commands["list"].collect_usage_pieces(ctx), "| COMMAND [ARGS]..."]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Those of `list`, then the commands."""
        self.commands["list"].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def _completed(self, args: list[str]) -> list[str]:
        return args if args and args[0] in self.commands else ["list", *args]


@click.group(cls=ListByDefault)
def jobs() -> None:
    """List training jobs; show or cancel one.

    Without a command, lists the jobs of the log, or of one RUN or model GROUP (`RUN/NAME`).
    """


@jobs.command("list")
@click.argument("chosen", metavar="[RUN|GROUP]", required=False)
@BOOTSTRAP_SERVERS
@WORKSPACE
def list_jobs(chosen: str | None, bootstrap_servers: str | None, workspace: Path) -> None:
    """List jobs: state, versions, base version."""
    from rollstream.harness.cli.finetune import print_runs
    from rollstream.harness.upkeep.run_tables import jobs_table

    async def table(log: "EventLog", unreadable: Counter[str]) -> str:
        return jobs_table(await chosen_runs(log, chosen, unreadable), _group(chosen))

    print_runs(workspace, bootstrap_servers, table)


@jobs.command()
@click.argument("job", metavar="JOB")
@BOOTSTRAP_SERVERS
@WORKSPACE
def show(job: str, bootstrap_servers: str | None, workspace: Path) -> None:
    """Show the job of this id (`RUN/NAME`): state, progress, versions, data and error."""
    from rollstream.harness.services.workspace import Workspace, on_log

    async def show(log: "EventLog") -> None:
        click.echo("\n".join(lines_of(await find_job(log, job))))

    on_log(Workspace(workspace), bootstrap_servers, "rollstream-jobs", show)


@jobs.command()
@click.argument("job", metavar="JOB")
@BOOTSTRAP_SERVERS
@WORKSPACE
def cancel(job: str, bootstrap_servers: str | None, workspace: Path) -> None:
    """Cancel the job of this id; versions that it has published stay."""
    from rollstream.harness.services.workspace import Workspace, on_log

    async def cancelled(log: "EventLog") -> None:
        await cancel_job(log, job)
        click.echo(f"job {job} cancelled")

    on_log(Workspace(workspace), bootstrap_servers, "rollstream-jobs", cancelled)


async def find_job(log: "EventLog", job_id: str) -> "FineTuneJob":
    """A job as the log says it. Raises ConfigError for an id that the log does not have."""
    from rollstream.eventlog.reading import decoded, read_to_end, unreadable_event
    from rollstream.eventlog.run_offsets import start_offsets_of
    from rollstream.learner.shared_model_group.group_view import view
    from rollstream.schemas.events.weights import JobEvent

    unreadable = ""
    starts = await start_offsets_of(log, ids.run_of(job_id))
    async for record in read_to_end(log, "jobs", {0: starts["jobs"]} if starts else None):
        if not ids.is_key_of_run(record.key or b"", ids.run_of(job_id)):
            continue
        received = decoded(record)
        event = None if received is None else received.event
        unreadable = unreadable or ("" if received is not None else unreadable_event(record))
        if isinstance(event, JobEvent) and event.job_id == job_id:
            group = await view(log, event.model_group, starts)
            await group.close()
            return group.state.job(job_id)
    if unreadable:
        raise ConfigError(
            f"job {job_id} is not among the records that this version of rollstream can read; a newer version may have "
            f"written {unreadable}: use the version that wrote it"
        )
    raise ConfigError(f"job {job_id} does not exist; `rollstream jobs` lists all jobs")


async def cancel_job(log: "EventLog", job_id: str) -> None:
    """Cancel a job. Raises ConfigError for one that does not exist or is over."""
    from rollstream.eventlog.log import wall_ms
    from rollstream.learner.shared_model_group.fine_tune_job import cancel_events

    job = await find_job(log, job_id)
    if job.is_over:
        raise ConfigError(f"job {job_id} is over ({job.state}); only an open job can be cancelled")
    await log.send_all(cancel_events(job, CAUSE, wall_ms()))


async def chosen_runs(log: "EventLog", chosen: str | None, unreadable: Counter[str] | None = None) -> "list[Progress]":
    """The runs whose jobs are listed: all, or the one that is chosen, of which alone the records are read.

    `unreadable`: see `read_runs`. Raises ConfigError for a run or a model group that does not exist.
    """
    from rollstream.harness.runs.follower import progress_of, read_runs

    if chosen is None:
        return await read_runs(log, unreadable)
    run = await progress_of(log, ids.run_of(chosen))
    group = _group(chosen)
    named = [job.submitted or job.skipped for job in run.jobs.values()]
    groups = {job.model_group for job in named if job is not None}
    if group is not None and group not in groups:
        known = ", ".join(sorted(groups)) or "none"
        raise ConfigError(f"model group {group} has no jobs; groups of the run with jobs: {known}")
    return [run]


def lines_of(job: "FineTuneJob") -> list[str]:
    """Lines that `show` prints."""
    submitted, fields = job.submitted, dict[str, Any]()
    fields |= {"job": job.job_id, "state": job.state, "progress": f"{job.progress:g} %"}
    if submitted is not None:
        settings = submitted.settings
        fields |= {"model_group": submitted.model_group, "kind": settings.kind, "algorithm": settings.algorithm.name}
        fields |= {"base_version": submitted.base_version, "versions": settings.num_versions}
    fields["final_version"] = job.final_version
    fields["adopted"] = None if job.switched_to is None else f"version {job.switched_to}"
    fine_tune = None if submitted is None else submitted.fine_tune
    if fine_tune is not None:
        fields |= {
            "name": fine_tune.name or None,
            "agents": ", ".join(fine_tune.agents),
            "examples": fine_tune.num_examples,
            "batches": f"{fine_tune.first_batch} to {fine_tune.num_batches}"
            if fine_tune.attempt
            else fine_tune.num_batches,
            "attempt": fine_tune.attempt,
            "parent_version": fine_tune.parent_version,
            "deadline_s": fine_tune.deadline_s,
            "data": fine_tune.data.uri,
        }
    fields["error"] = job.error or None
    return [f"{name:<15} {value}" for name, value in fields.items() if value is not None]


def _group(chosen: str | None) -> str | None:
    return chosen if chosen is not None and "/" in chosen else None
