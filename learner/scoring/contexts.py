"""Privileged context: the text of each trajectory that only its scorer sees, from the inputs of its task."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Any

import orjson

from rollstream.eventlog import codec
from rollstream.eventlog.log import EventLog
from rollstream.eventlog.reading import read_to_end
from rollstream.schemas.algorithm_settings import CONTEXT_KEY
from rollstream.schemas.errors import DecodeError, RunFailedError, nearest
from rollstream.schemas.events import JobSubmitted, RunStarted, TrajectoryAssembled
from rollstream.schemas.settings import ArtifactRef

Read = Callable[[ArtifactRef], Awaitable[bytes]]
Inputs = Mapping[str, Mapping[str, Any]]
"""Inputs of examples by their ids."""


async def inputs_of(log: EventLog, job: JobSubmitted, read: Read, wanted: Set[str]) -> Inputs:
    """Inputs of the wanted examples, from the dataset of the job's run. The rest of the dataset is discarded.

    It reads, hashes and parses the whole dataset: ask once for a batch.
    """
    found: dict[str, dict[str, Any]] = {}
    started = await _started(log, job)
    for line in filter(bytes.strip, (await read(started.dataset)).splitlines()):
        example = orjson.loads(line)
        if example["example_id"] in wanted:
            found[example["example_id"]] = example["inputs"]
    return found


def contexts_of(template: str, trajectories: Sequence[TrajectoryAssembled], inputs: Inputs) -> list[str]:
    """The template with the inputs of each trajectory's example.

    Raises RunFailedError naming an example that the dataset lacks or a key that its inputs lack.
    """
    return [_filled(template, one.example_id, inputs) for one in trajectories]


def _filled(template: str, example_id: str, inputs: Inputs) -> str:
    known = inputs.get(example_id)
    if known is None:
        raise RunFailedError(
            f"algorithm.context: the run's dataset has no example {example_id!r}; train on tasks of the dataset"
        )

    def value(found: "re.Match[str]") -> str:
        name = found[1]
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near is not None else f"it has {', '.join(sorted(known)) or 'none'}"
            raise RunFailedError(f"algorithm.context: the inputs of example {example_id!r} have no {name!r}; {hint}")
        return known[name] if isinstance(known[name], str) else orjson.dumps(known[name]).decode()

    return CONTEXT_KEY.sub(value, template)


async def _started(log: EventLog, job: JobSubmitted) -> RunStarted:
    """The job's run. Raises DecodeError if topic groups does not have its start."""
    begin = (await log.begin_offsets("groups"))[0]
    start = max(begin, (job.start_offsets or {}).get("groups", begin))
    async for record in read_to_end(log, "groups", {0: start}):
        if record.key == job.run_id.encode() and codec.kind_of(record) == "run_started":
            event = codec.decode(record).event
            assert isinstance(event, RunStarted)
            return event
    raise DecodeError(
        f"topic groups has no start of run {job.run_id}, whose dataset algorithm.context needs; begin a new run"
    )
