"""Writes a run's closed groups as a JSON Lines file of one of the formats."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import orjson

from rollstream.eventlog.files import replacing
from rollstream.eventlog.log import ReadableLog
from rollstream.harness.components.trajectories import read_assembled, read_steps
from rollstream.harness.datasets.atif import atif
from rollstream.harness.datasets.conversations import RecordedTrajectory
from rollstream.harness.datasets.training_rows import Format, RowOptions, Tally, openai_chat, trl_dpo, trl_kto, trl_sft
from rollstream.replay.source import read_run
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import GroupClosed
from rollstream.schemas.events.rollouts import Purpose

FORMATS: Mapping[str, Format] = {
    "trl-sft": trl_sft,
    "trl-dpo": trl_dpo,
    "trl-kto": trl_kto,
    "openai-chat": openai_chat,
    "atif": atif,
}
GROUPS_AT_ONCE = 16
"""Groups in memory at a time."""


def check_new_file(path: Path) -> None:
    """Raises ConfigError if there is something already."""
    if path.exists():
        raise ConfigError(f"{path} already exists; remove it, or give another with --output")


async def write_rows(
    log: ReadableLog,
    run_id: str,
    path: Path,
    format: Format,
    choice: RowOptions,
    *,
    purpose: Purpose = "train",
    agent: str | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Tally:
    """Write the rows of all complete members of the run's groups, in the order in which the groups closed.

    `report`: called with the numbers of groups written and of all. Raises ConfigError for an unknown run or agent, or a
    file that cannot be written; TruncatedError if records of a group are no longer retained, ArtifactError if one
    differs from what its group recorded.
    """
    events = await read_run(log, run_id)
    _ = events.started
    closed = [one.event for one in events.by_topic.get("groups", ()) if isinstance(one.event, GroupClosed)]
    groups = [one for one in closed if one.purpose == purpose and one.members]
    check_agent(groups, agent)
    tally = Tally()
    try:
        check_new_file(path)
        with replacing(path, is_private=False) as file:
            for begin in range(0, len(groups), GROUPS_AT_ONCE):
                for group in await _read(log, groups[begin : begin + GROUPS_AT_ONCE], agent):
                    _write(file, format, group, choice, tally)
                report(min(begin + GROUPS_AT_ONCE, len(groups)), len(groups))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); give another with --output") from error
    return tally


def check_agent(groups: Sequence[GroupClosed], agent: str | None) -> None:
    """Raises ConfigError if no member of the groups is the agent's."""
    known = {member.agent for group in groups for member in group.members}
    if agent is not None and agent not in known:
        raise ConfigError(f"no trajectory is of agent {agent!r}; give one of {', '.join(sorted(known)) or 'none'}")


async def _read(log: ReadableLog, groups: Sequence[GroupClosed], agent: str | None) -> list[list[RecordedTrajectory]]:
    assembled, steps = await read_assembled(log, groups), await read_steps(log, groups)
    return [
        [
            RecordedTrajectory(group, member, assembled[member.trajectory_id], steps.get(member.rollout_id, {}))
            for member in group.members
            if agent is None or member.agent == agent
        ]
        for group in groups
    ]


def _write(file: BinaryIO, format: Format, group: list[RecordedTrajectory], choice: RowOptions, tally: Tally) -> None:
    for row in format(group, choice, tally):
        file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        tally.num_rows += 1
