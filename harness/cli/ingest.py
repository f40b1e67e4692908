"""Command `ingest`."""

from pathlib import Path

import click

from rollstream.harness.cli.shared_options import OVERRIDE, WORKSPACE
from rollstream.harness.cli.terminal import train


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--config_file",
    "--config-file",
    type=click.Path(path_type=Path),
    required=True,
    help="The YAML file of the run: its model and algorithm; the environment is `recorded`.",
)
@OVERRIDE
@click.option(
    "--group_by",
    type=click.Choice(["workflow_run_id", "conversation_id"]),
    default="workflow_run_id",
    help="The id in NAT's provided_metadata by which bare steps are grouped into rollouts.",
)
@click.option("--resume", metavar="RUN", help="Resume a run that was started from the same file.")
@click.option("--name", help="Prefix of the run's id (default: the configuration's name).")
@click.option("--run_id", "--run-id", help="The run's full id, instead of a prefix and six hex digits.")
@WORKSPACE
def ingest(
    file: Path,
    config_file: Path,
    override: tuple[tuple[str, str], ...],
    group_by: str,
    resume: str | None,
    name: str | None,
    run_id: str | None,
    workspace: Path,
) -> None:
    """Train on the recorded steps of a file.

    FILE becomes the rollouts of a new run. Each line of it is a JSON object, of any of these kinds:

    \b
    - an IntermediateStep as NAT writes it; steps of one workflow run form a rollout, rollouts with equal input share an
      example
    - {"example_id": ..., "rollout_id": ..., "reward": 1.0, "steps": [...]},
      with question, answer or inputs, rewards by name, step_rewards by the
      step's UUID, error; with "step" in place of "steps", one step
    - {"rollout_id": ..., "reward": 1.0}: the reward of a rollout on other lines

    finetuning.target_functions and target_model select the calls to train on. Calls without token ids are skipped
    unless environment_config sets retokenise: true. A line that cannot be used is written to the dead letters
    (rollstream dlq list); the other lines are ingested.
    """
    from rollstream.harness.finetune import Request
    from rollstream.harness.recorded.ingest import dead_letter_lines, prepare

    prepared = prepare(file, config_file, workspace, override, key=group_by)
    click.echo(prepared.ingested.summary())
    for line in prepared.ingested.bad:
        click.echo(f"{file} line {line.number}: {line.reason}", err=True)
    if prepared.ingested.bad and resume is None:
        dead_letter_lines(prepared.ingested.bad, file, config_file, workspace, prepared.overrides)
    options = {"dataset": str(prepared.dataset)}
    train(Request(config_file, workspace, prepared.overrides, options, resume, name, run_id=run_id))
