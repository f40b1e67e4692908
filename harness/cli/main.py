"""The command line `rollstream`.

A command's module is imported on first use; errors are printed as one line on stderr.
"""

import errno
import gc
import importlib
import logging
import os
import signal
import sys

import click

from rollstream.eventlog.disk_space import FULL
from rollstream.harness.services.live_line import discard_output
from rollstream.harness.services.optional_dependencies import missing
from rollstream.metrics.sql.printable import printable_output
from rollstream.producers.rollout.user_code import find_users_modules
from rollstream.schemas import variables
from rollstream.schemas.errors import RollstreamError

COMMANDS = {
    "finetune": "finetune",
    "validate": "finetune",
    "ingest": "ingest",
    "stop": "finetune",
    "rollback": "rollback",
    "runs": "finetune",
    "jobs": "job_commands",
    "serve": "serve",
    "health": "serve",
    "status": "inspect",
    "sql": "inspect",
    "plot": "inspect",
    "track": "inspect",
    "schema": "inspect",
    "dlq": "dlq",
    "replay": "replay",
    "match": "match",
    "export": "export",
    "rebuild": "export",
    "merge": "merge",
    "gc": "gc",
    "tiny-model": "inspect",
}
SUMMARIES = {
    "finetune": "Train from a configuration file, or resume a run.",
    "validate": "Check a configuration file as finetune does, without training.",
    "ingest": "Train on the recorded steps of a file.",
    "stop": "Stop a run gracefully.",
    "rollback": "Return a model group of a run to an earlier version.",
    "runs": "List runs: state, jobs, versions, mean reward of the last epoch.",
    "jobs": "List training jobs; show or cancel one.",
    "serve": "Run one service until SIGTERM or Ctrl-C.",
    "health": "Check whether a service is alive.",
    "status": "Show services, lag by topic and newest version by engine.",
    "sql": "Query the metrics with read-only SQL, during or after a run.",
    "plot": "Plot a run's reward and the curriculum's percentile.",
    "track": "Send a run's metrics to an experiment tracker.",
    "schema": "Print the topics and the JSON schema of every event as an AsyncAPI document.",
    "dlq": "Show dead letters and send their records again.",
    "replay": "Replay a run and compare its results, or run a what-if.",
    "match": "Play a recorded match again, with the same or other players.",
    "export": "Export a run as Parquet files with a manifest of hashes.",
    "rebuild": "Rebuild the metrics file from the topics or an export.",
    "merge": "Write a version as a whole model for transformers and vLLM.",
    "gc": "Remove weights that are no longer needed.",
    "tiny-model": "Create a tiny model and tokenizer for trying things out.",
}
"""The first paragraph of each command's help, so that listing the commands imports none of them."""
EXIT_INTERRUPTED = 130
ERRORS_OF_A_PATH = (
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
)
COLLECT_AFTER = 10_000
"""Objects between two garbage collections: with Python's 700, collecting takes a fifth of the time of importing torch.
"""


class LazyGroup(click.Group):
    """Commands by their module in `commands`; listing them imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"rollstream.harness.cli.{COMMANDS[cmd_name]}")
        return getattr(module, cmd_name.replace("-", "_"))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rollstream")
@click.option("--debug", is_flag=True, help="Show tracebacks (also: ROLLSTREAM_DEBUG=1).")
def rollstream(debug: bool) -> None:
    """Event-sourced streaming RL post-training for LLM agents."""
    if debug:
        os.environ["ROLLSTREAM_DEBUG"] = "1"
    # errors are printed as one line; long-running commands configure logging themselves
    logging.basicConfig(level=logging.CRITICAL)


def main() -> None:
    """Entry point of the command line."""
    with printable_output():
        _run()


def end_at_sigterm() -> None:
    """End a process 1, as in a container without an init, at SIGTERM until a command has a handler of its own.

    The kernel would drop the signal.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _run() -> None:
    end_at_sigterm()
    find_users_modules()
    gc.set_threshold(COLLECT_AFTER)
    try:
        code = rollstream.main(standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Abort:
        code = EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (RollstreamError, OSError) as error:
        if os.environ.get("ROLLSTREAM_DEBUG"):
            raise
        click.echo(f"error: {error_line(error)}", err=True)
        code = 1
    except ModuleNotFoundError as error:
        reason = missing(error)
        if reason is None or os.environ.get("ROLLSTREAM_DEBUG"):
            raise
        click.echo(f"error: {reason}", err=True)
        code = 1
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    try:
        sys.stdout.flush()
    except OSError:  # reported above, and a second time when Python ends
        discard_output(sys.stdout)
    sys.exit(code if isinstance(code, int) else 0)


def error_line(error: BaseException) -> str:
    """An error's message on one line without secrets, or its type if the message is empty; for an OSError, path and
    remedy."""
    if isinstance(error, OSError) and error.errno in FULL and error.strerror == os.strerror(error.errno):
        if not isinstance(error.filename, str):
            return f"{error.strerror}; free some space on each disk that the command writes to"
        return variables.conceal(f"{error.filename}: {error.strerror}; free some space there, or write to another disk")
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.errno in ERRORS_OF_A_PATH:
        return variables.conceal(f"{error.filename}: {error.strerror}; correct the path or its permissions")
    return variables.one_line(error, None) or type(error).__name__


if __name__ == "__main__":
    main()
