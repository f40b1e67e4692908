"""Commands `serve` and `health`."""

import asyncio
import logging
import os
import shlex
import sys
from pathlib import Path

import click

from rollstream.harness.cli.shared_options import WORKSPACE
from rollstream.harness.services.concealing import conceal_logs
from rollstream.harness.services.log_handlers import StreamHandler
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.variables import conceal_variables

SERVICES = ("broker", "producers", "processors", "learner", "metrics", "tracker", "gateway", "endpoint")


@click.command()
@click.argument("service", type=click.Choice(SERVICES))
@click.option("--name", help="Stable name of this process (default: SERVICE-1).")
@click.option("--settings", help="JSON file with settings; - reads standard input. Environment: ROLLSTREAM_*.")
@click.option(
    "--allow",
    multiple=True,
    metavar="NAME",
    help="What records may name in addition to registered names: python:module.attribute, 'command:PROGRAM ARGUMENTS', "
    "${VARIABLE}, http://host:port/path, model:PATH or file:PATH. Repeatable. Environment: ROLLSTREAM_ALLOW, separated "
    "by spaces; quote an entry that has some.",
)
def serve(service: str, name: str | None, settings: str | None, allow: tuple[str, ...]) -> None:
    """Run one service until SIGTERM or Ctrl-C.

    ROLLSTREAM_WORKSPACE names its workspace (.rollstream).

    \b
    gateway  answers OpenAI's and Anthropic's APIs. Settings with model_group: with that group's newest weights,
             and records nothing. Settings with the section "gateway": it is a producers process, listens from its
             start, and records the rollouts of the tasks that it gets, which agents claim and play.
    endpoint is the gateway that records nothing.
    """
    from rollstream.harness.services import serving

    _configure_logging()
    given = serving.read_settings(settings) | ({"allow": allow} if allow else {})
    if service == "broker":
        _serve_broker(Path(serving.workspace_of(os.environ)))
        return
    meant = serving.recording(service, given)
    found = serving.settings_of(meant, name or serving.name_of(service, given), given, os.environ)
    conceal_variables(serving.variables_of(found))
    serving.serve(meant, found)


@click.command()
@click.argument("name")
@WORKSPACE
def health(name: str, workspace: Path) -> None:
    """Check whether a service is alive.

    Exit status 0 if the service NAME sent a recent heartbeat, else 1.
    """
    from rollstream.harness.services.liveness import read_sign
    from rollstream.harness.services.workspace import Workspace

    sign = read_sign(Workspace(workspace).health, name)
    if sign is None:
        click.echo(f"{name}: no heartbeat found in {workspace}; start the service, or give its --workspace", err=True)
        sys.exit(1)
    click.echo(f"{name}: {sign.state}, last sign {sign.age_s:.0f} s ago")
    sys.exit(0 if sign.is_alive else 1)


def _configure_logging() -> None:
    level = (os.environ.get("ROLLSTREAM_LOG_LEVEL") or "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(
            f"ROLLSTREAM_LOG_LEVEL={level} is not a log level; use DEBUG, INFO, WARNING, ERROR or CRITICAL"
        )
    logging.basicConfig(
        level=level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[StreamHandler(sys.stderr)],
        force=True,
    )
    conceal_logs()
    for noisy in ("aiokafka", "faust", "mode", "httpx", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _serve_broker(workspace: Path) -> None:
    from rollstream.eventlog.broker.credentials import environment
    from rollstream.harness.services.liveness import die_with_parent
    from rollstream.harness.services.serving import keep_broker
    from rollstream.harness.services.workspace import served_broker

    die_with_parent(os.environ)
    with served_broker(workspace) as (kafka, broker, run_pid):
        click.echo(f"broker {kafka.bootstrap_servers} ready")
        if run_pid:
            click.echo(f"a run (process {run_pid}) took it over and has it; it is started here once that run has ended")
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment(kafka).items())
        click.echo(f"for services with this workspace: ROLLSTREAM_BOOTSTRAP_SERVERS={kafka.bootstrap_servers}")
        click.echo(f"for services and commands with another workspace: {variables}")
        asyncio.run(keep_broker(broker))
