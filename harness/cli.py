"""The command line `rollstream`. A command's code is imported when it is used; errors are one line on stderr."""

import errno
import gc
import importlib
import logging
import os
import sys

import click

from rollstream.harness.extras import missing
from rollstream.schemas.errors import RollstreamError

COMMANDS = {
    "finetune": "run",
    "ingest": "ingest",
    "stop": "run",
    "runs": "run",
    "jobs": "run",
    "serve": "serve",
    "health": "serve",
    "status": "look",
    "sql": "look",
    "plot": "look",
    "dlq": "dlq",
    "replay": "replay",
    "export": "export",
    "rebuild": "export",
    "gc": "gc",
    "tiny-model": "look",
}
SUMMARIES = {
    "finetune": "Train by a configuration file, or go on with a run.",
    "ingest": "Train on recorded steps of a file.",
    "stop": "End a run in order.",
    "runs": "List the runs of a workspace.",
    "jobs": "List the training jobs of its runs.",
    "serve": "Run one long-running service.",
    "health": "Say whether a service is alive (exit status 0).",
    "status": "Show services, lag by topic and version by engine.",
    "sql": "Ask the metrics by SQL.",
    "plot": "Draw a run's rewards.",
    "dlq": "Show dead letters and send their records again.",
    "replay": "Replay a run and say whether it comes out equal.",
    "export": "Keep a run as Parquet files and a manifest of hashes.",
    "rebuild": "Make the metrics file again, from the topics or an export.",
    "gc": "Remove weights that nothing needs any more.",
    "tiny-model": "Make a tiny model and tokenizer in place, for trying things out.",
}
EXIT_INTERRUPTED = 130
ERRORS_OF_A_PATH = (
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
)
COLLECT_AFTER = 10_000
"""Objects between two garbage collections: with Python's 700, collecting is a fifth of what importing torch takes."""


class LazyGroup(click.Group):
    """Commands by their module in `commands`; listing them imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"rollstream.harness.commands.{COMMANDS[cmd_name]}")
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
    logging.basicConfig(level=logging.CRITICAL)  # what fails is told as one line; long commands set up their logs


def main() -> None:
    """Entry point of the command line."""
    find_users_modules()
    gc.set_threshold(COLLECT_AFTER)
    try:
        code = rollstream.main(standalone_mode=False)
    except click.exceptions.Abort:
        code = EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (RollstreamError, OSError) as error:
        if os.environ.get("ROLLSTREAM_DEBUG"):
            raise
        click.echo(f"error: {one_line(error)}", err=True)
        code = 1
    except ModuleNotFoundError as error:
        told = missing(error)
        if told is None or os.environ.get("ROLLSTREAM_DEBUG"):
            raise
        click.echo(f"error: {told}", err=True)
        code = 1
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.stdout.flush()
    sys.exit(code if isinstance(code, int) else 0)


def find_users_modules() -> None:
    """Modules of the folder that a command is started in are found, after all others, as its services find them."""
    if not sys.flags.safe_path and "" not in sys.path:
        sys.path.append("")


def one_line(error: BaseException) -> str:
    """An error's message without line breaks; its type if it has no message. Of a file: its path and the remedy."""
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.errno in ERRORS_OF_A_PATH:
        return f"{error.filename}: {error.strerror}; correct the path or its permissions"
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    main()
