"""Command `ingest`."""

from pathlib import Path

import click

from rollstream.harness.commands.serve import WORKSPACE


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--config_file",
    "--config-file",
    type=click.Path(path_type=Path),
    required=True,
    help="The YAML file of the run: its model and algorithm (grpo, sft or dpo); the environment is `recorded`.",
)
@click.option("--override", "-o", type=(str, str), multiple=True, metavar="KEY VALUE", help="Set a key by dotted path.")
@click.option(
    "--group_by",
    type=click.Choice(["workflow_run_id", "conversation_id"]),
    default="workflow_run_id",
    help="Which id of NAT's provided_metadata makes one rollout of bare steps.",
)
@click.option("--resume", metavar="RUN", help="Go on with a run that was begun from the same file.")
@click.option("--name", help="Beginning of the run's id (default: the configuration's name).")
@click.option("--run_id", "--run-id", help="The run's whole id, in place of a name and six digits.")
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
    """Train on recorded steps: FILE becomes the rollouts of a new run.

    Each line of FILE is a JSON object, of any of these kinds:

    \b
    - an IntermediateStep as NAT writes it; steps are grouped to rollouts
      by the workflow run around them, rollouts with equal input to examples
    - {"example_id": ..., "rollout_id": ..., "reward": 1.0, "steps": [...]},
      with question, answer or inputs, rewards by name, step_rewards by the
      step's UUID, error; with "step" in place of "steps", one step
    - {"rollout_id": ..., "reward": 1.0}: what a rollout of other lines earned

    finetuning.target_functions and target_model choose the calls that are trained on. Calls without token ids are not,
    unless environment_config says retokenise: true. A line that cannot be used is kept as a dead letter (rollstream
    dlq list) and the rest goes on.
    """
    from rollstream.harness.commands.run import train
    from rollstream.harness.finetune import Request
    from rollstream.harness.recorded.ingest_run import bury, prepare

    prepared = prepare(file, config_file, workspace, override, key=group_by)
    click.echo(prepared.ingested.summary())
    for line in prepared.ingested.bad:
        click.echo(f"{file} line {line.number}: {line.reason}", err=True)
    if prepared.ingested.bad and resume is None:
        bury(prepared.ingested.bad, file, config_file, workspace, prepared.overrides)
    options = {"dataset": str(prepared.dataset)}
    train(Request(config_file, workspace, prepared.overrides, options, resume, name, run_id=run_id))
