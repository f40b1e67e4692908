"""The command `jobs`: lists training jobs, shows one, cancels one. Options only; `run_control` does the work."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollstream.harness.cli.shared_options import BOOTSTRAP_SERVERS, WORKSPACE
from rollstream.harness.cli.terminal import print_runs

if TYPE_CHECKING:
    from rollstream.eventlog.log import EventLog, ReadableLog


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
    from rollstream.harness.upkeep.run_control import chosen_runs, model_group_of
    from rollstream.harness.upkeep.run_tables import jobs_table

    async def table(log: "ReadableLog", unreadable: Counter[str]) -> str:
        return jobs_table(await chosen_runs(log, chosen, unreadable), model_group_of(chosen))

    print_runs(workspace, bootstrap_servers, table)


@jobs.command()
@click.argument("job", metavar="JOB")
@BOOTSTRAP_SERVERS
@WORKSPACE
def show(job: str, bootstrap_servers: str | None, workspace: Path) -> None:
    """Show the job of this id (`RUN/NAME`): state, progress, versions, data and error."""
    from rollstream.harness.services.workspace import Workspace, on_log
    from rollstream.harness.upkeep.run_control import find_job
    from rollstream.harness.upkeep.run_tables import job_lines

    async def write(log: "ReadableLog") -> None:
        click.echo("\n".join(job_lines(await find_job(log, job))))

    on_log(Workspace(workspace), bootstrap_servers, "rollstream-jobs", write)


@jobs.command()
@click.argument("job", metavar="JOB")
@BOOTSTRAP_SERVERS
@WORKSPACE
def cancel(job: str, bootstrap_servers: str | None, workspace: Path) -> None:
    """Cancel the job of this id; versions that it has published stay."""
    from rollstream.harness.services.workspace import Workspace, on_log
    from rollstream.harness.upkeep.run_control import cancel_job

    async def cancelled(log: "EventLog") -> None:
        await cancel_job(log, job)
        click.echo(f"job {job} cancelled")

    on_log(Workspace(workspace), bootstrap_servers, "rollstream-jobs", cancelled)
