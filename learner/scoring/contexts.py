"""Privileged context: the text of each trajectory that only its scorer sees, from the inputs of its task."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from rollstream.eventlog import codec
from rollstream.eventlog.log import ReadableLog
from rollstream.eventlog.reading import read_to_end
from rollstream.schemas.algorithm_settings import CONTEXT_KEY
from rollstream.schemas.errors import DecodeError, RunFailedError, nearest
from rollstream.schemas.events import JobSubmitted, RunStarted, TrajectoryAssembled
from rollstream.schemas.settings import ArtifactRef

Read = Callable[[ArtifactRef], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class _Needed:
    """The part of a dataset that a template needs."""

    names: tuple[str, ...]
    """Keys in the template, in order."""
    values: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Values of these keys by example."""
    others: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Keys of the examples that lack one of them."""


class Contexts:
    """The contexts of a job. The dataset of its run is read once, and the values that templates name are kept."""

    def __init__(self, log: ReadableLog, job: JobSubmitted, read: Read) -> None:
        self._log = log
        self._job = job
        self._read = read
        self._needed: dict[str, _Needed] = {}
        """Parts of the dataset by template."""

    async def of(self, template: str, trajectories: Sequence[TrajectoryAssembled]) -> list[str]:
        """The template with the inputs of each trajectory's example.

        Raises RunFailedError naming an example that the dataset lacks or a key that its inputs lack.
        """
        needed = self._needed.get(template)
        if needed is None:
            started = await _started(self._log, self._job)
            content = await self._read(started.dataset)
            needed = self._needed[template] = await asyncio.to_thread(_needed, template, content)
        return [_filled(template, one.example_id, needed) for one in trajectories]


def _needed(template: str, dataset: bytes) -> _Needed:
    needed = _Needed(tuple(dict.fromkeys(CONTEXT_KEY.findall(template))))
    for line in filter(bytes.strip, dataset.splitlines()):
        example = orjson.loads(line)
        inputs = example["inputs"]
        if all(name in inputs for name in needed.names):
            needed.values[example["example_id"]] = tuple(_text(inputs[name]) for name in needed.names)
        else:
            needed.others[example["example_id"]] = tuple(inputs)
    return needed


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _filled(template: str, example_id: str, needed: _Needed) -> str:
    values = needed.values.get(example_id)
    if values is None:
        raise _lacking(example_id, needed)
    by_name = dict(zip(needed.names, values, strict=True))

    def value(found: "re.Match[str]") -> str:
        return by_name[found[1]]

    return CONTEXT_KEY.sub(value, template)


def _lacking(example_id: str, needed: _Needed) -> RunFailedError:
    known = needed.others.get(example_id)
    if known is None:
        return RunFailedError(
            f"algorithm.context: the run's dataset has no example {example_id!r}; train on tasks of the dataset"
        )
    name = next(name for name in needed.names if name not in known)
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near is not None else f"it has {', '.join(sorted(known)) or 'none'}"
    return RunFailedError(f"algorithm.context: the inputs of example {example_id!r} have no {name!r}; {hint}")


async def _started(log: ReadableLog, job: JobSubmitted) -> RunStarted:
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
