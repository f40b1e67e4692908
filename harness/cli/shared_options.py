"""Options and arguments that several commands take."""

from pathlib import Path

import click

RUN = click.argument("run")
WORKSPACE = click.option(
    "--workspace",
    "-w",
    type=click.Path(path_type=Path),
    envvar="ROLLSTREAM_WORKSPACE",
    default=Path(".rollstream"),
    show_default=True,
    show_envvar=True,
    help="The workspace: a folder with broker, logs, metrics and checkpoints.",
)
BOOTSTRAP_SERVERS = click.option(
    "--bootstrap_servers",
    envvar="ROLLSTREAM_BOOTSTRAP_SERVERS",
    show_envvar=True,
    help="Bootstrap servers of a Kafka cluster, instead of the workspace's own broker.",
)
ARTIFACT_URI = click.option(
    "--artifact_uri", envvar="ROLLSTREAM_ARTIFACT_URI", help="The artifact store, if not the workspace's own."
)
OVERRIDE = click.option(
    "--override", "-o", type=(str, str), multiple=True, metavar="KEY VALUE", help="Set a key by dotted path."
)
TRUST = click.option(
    "--trust",
    is_flag=True,
    help="Trust the run's stored configuration: import the code and expand the ${VARIABLES} that only it names.",
)
