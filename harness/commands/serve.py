"""Commands `serve` and `health`."""

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollstream.schemas.errors import ConfigError

if TYPE_CHECKING:
    from rollstream.eventlog.broker import EmbeddedBroker

SERVICES = ("broker", "producers", "processors", "learner", "metrics", "endpoint")
WORKSPACE = click.option(
    "--workspace", "-w", type=click.Path(path_type=Path), envvar="ROLLSTREAM_WORKSPACE", default=Path(".rollstream")
)


BOOTSTRAP_SERVERS = click.option(
    "--bootstrap_servers", envvar="ROLLSTREAM_BOOTSTRAP_SERVERS", help="A Kafka, in place of the workspace's own."
)


@click.command()
@click.argument("service", type=click.Choice(SERVICES))
@click.option("--name", help="Stable name of this process (default: SERVICE-1).")
@click.option("--settings", help="JSON file with settings; - reads standard input. Environment: ROLLSTREAM_*.")
def serve(service: str, name: str | None, settings: str | None) -> None:
    """Run one long-running service until SIGTERM or Ctrl-C."""
    from rollstream.harness.services import serving

    _configure_logging()
    given = serving.read_settings(settings)
    if service == "broker":
        _serve_broker(Path(os.environ.get("ROLLSTREAM_WORKSPACE", ".rollstream")))
        return
    serving.serve(service, serving.settings_of(service, name, given, os.environ))


@click.command()
@click.argument("name")
@WORKSPACE
def health(name: str, workspace: Path) -> None:
    """Exit 0 if the service NAME gave a sign of life lately, else 1."""
    from rollstream.harness.services.heartbeat import read_sign
    from rollstream.harness.workspace import Workspace

    sign = read_sign(Workspace(workspace).health, name)
    if sign is None:
        click.echo(f"{name}: no sign of life below {workspace}", err=True)
        sys.exit(1)
    click.echo(f"{name}: {'alive' if sign.is_alive else 'silent'}, last sign {sign.age_s:.0f} s ago")
    sys.exit(0 if sign.is_alive else 1)


def _configure_logging() -> None:
    level = os.environ.get("ROLLSTREAM_LOG_LEVEL", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"ROLLSTREAM_LOG_LEVEL={level}: give DEBUG, INFO, WARNING, ERROR or CRITICAL")
    logging.basicConfig(
        level=level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    for noisy in ("aiokafka", "faust", "mode", "httpx", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _serve_broker(workspace: Path) -> None:
    from rollstream.eventlog.broker import EmbeddedBroker
    from rollstream.harness.services.lifeline import tie_to_parent

    tie_to_parent(os.environ)
    with EmbeddedBroker(workspace) as broker:
        click.echo(f"broker {broker.bootstrap_servers} ready")
        asyncio.run(_keep(broker))


async def _keep(broker: "EmbeddedBroker") -> None:
    """Start a broker that dies again, until a signal comes. Raises BrokerError if it dies too often."""
    from rollstream.harness.services.broker_watch import keep_running

    watching = asyncio.create_task(keep_running(broker, click.echo))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, watching.cancel)
    with suppress(asyncio.CancelledError):
        await watching
