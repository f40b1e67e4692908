"""A file of recorded steps as groups of recorded rollouts: every line is used or is a bad line with a reason. Pure.

A line is one JSON object of these:

- an IntermediateStep as NAT writes it. Steps belong to the workflow run of their spans; its input is the example: runs
  with the same input form one group.
- `{"rollout_id", "example_id", "steps": [...], "reward", ...}`: a whole rollout.
- `{"rollout_id", "step": {...}}`: one step of the named rollout.
- `{"rollout_id", "reward": ...}`: the reward of a rollout on other lines.
- `{"schema_version": "ATIF-v1.7", ...}`: a document of the Agent Trajectory Interchange Format.

A rollout's line may also have `inputs` (or `question`, `answer`), `rewards` by name, `step_rewards` by the
step's UUID, and `error`, which makes it a failed attempt. What is equal on several lines counts once, but for rollouts
without a name.
"""

import codecs
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
from pydantic import JsonValue, ValidationError

from rollstream.harness.config.dataset import MAX_INPUT_BYTES
from rollstream.harness.recorded.atif_documents import is_document, rollout_line
from rollstream.producers.traces.spans import Selection, recorded_steps, scores
from rollstream.schemas.errors import DecodeError, describe, first_invalid
from rollstream.schemas.events.intermediate_steps import IntermediateStep, IntermediateStepType
from rollstream.schemas.events.recorded import INPUT, RecordedGroup, RecordedReward, RecordedRollout, RecordedStep

STEP_KEYS = {"parent_id", "function_ancestry", "payload"}
ROLLOUT_KEYS = {
    *("rollout_id", "example_id", "steps", "step", "reward", "rewards", "step_rewards", "error"),
    *("inputs", "question", "answer"),
}
FEW_NESTED = 200
"""A line with fewer arrays and objects cannot be nested too deeply."""
MAX_OWN_BYTES = MAX_INPUT_BYTES - 16 * 1024
"""Maximum size of an example's own inputs as JSON, which leaves space for references to its rollouts."""
LEVELS_AROUND = 16
"""Levels that a record has around the values of a line, at most."""
KEYS = ("workflow_run_id", "conversation_id")
"""Keys of NAT's `provided_metadata` that assign the steps of a file to rollouts."""


class BadLine(NamedTuple):
    """A line that cannot be used, with the reason."""

    number: int
    """Line number, from 1."""
    raw: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Ingested:
    """The contents of a file."""

    groups: tuple[RecordedGroup, ...]
    bad: tuple[BadLine, ...]
    num_steps: int
    untrained: Counter[str]
    """LLM calls that are not trained on, by reason, as far as it is known here."""

    @property
    def num_rollouts(self) -> int:
        """Rollouts of all groups."""
        return sum(len(group.members) for group in self.groups)

    @property
    def largest(self) -> int:
        """Rollouts of the largest group."""
        return max((len(group.members) for group in self.groups), default=0)

    def summary(self) -> str:
        """One line for a person."""
        text = f"{self.num_rollouts} rollouts of {len(self.groups)} examples from {self.num_steps} steps"
        dropped = [f"{count} calls {reason}" for reason, count in sorted(self.untrained.items())]
        dropped += [f"{len(self.bad)} bad lines"] if self.bad else []
        return text + (f"; dropped: {', '.join(dropped)}" if dropped else "")


class _Unusable(ValueError):
    """A line has none of the known formats."""


@dataclass(slots=True)
class _Gathered:
    """A rollout that is being read line by line."""

    example_id: str | None = None
    inputs: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    steps: list[IntermediateStep] = field(default_factory=list[IntermediateStep])
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    step_rewards: dict[str, float] = field(default_factory=dict[str, float])
    error: str | None = None


def read_lines(
    lines: Iterable[bytes], selection: Selection, *, key: str = KEYS[0], retokenise: bool = False
) -> Ingested:
    """All rollouts of a file's lines, in order of their first line. `key`: one of KEYS. Raises nothing."""
    reader = _Reader(key)
    bad: list[BadLine] = []
    for number, raw in enumerate(lines, 1):
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if not raw.strip():
            continue
        try:
            reader.read(raw)
        except (_Unusable, ValidationError) as error:
            bad.append(BadLine(number, raw, _reason(error)))
    members: dict[str, list[RecordedRollout]] = {}
    inputs: dict[str, dict[str, JsonValue]] = {}
    for name, gathered in reader.named():
        example_id = gathered.example_id or _example_of(gathered) or name
        members.setdefault(example_id, []).append(_rollout(name, gathered, selection))
        own = inputs.setdefault(example_id, dict(reader.inputs.get(example_id, {})))
        inputs[example_id] = {**own, **(gathered.inputs or _question_of(gathered.steps)), **own}
    groups = tuple(RecordedGroup.of(name, rollouts, inputs[name]) for name, rollouts in members.items())
    steps = [step for rollouts in members.values() for rollout in rollouts for step in rollout.steps]
    num_steps = sum(len(gathered.steps) for gathered in reader.rollouts.values())
    return Ingested(groups, tuple(bad), num_steps, _untrained(steps, retokenise=retokenise))


class _Reader:
    """Groups lines by rollout."""

    def __init__(self, key: str) -> None:
        self.rollouts: dict[str | int, _Gathered] = {}
        """Rollouts by name, or by number where a line has none."""
        self.inputs: dict[str, dict[str, JsonValue]] = {}
        """Inputs that lines give, by `example_id`."""
        self._key = key
        self._seen: set[bytes] = set()
        """Digests of the lines of named rollouts and of single steps: one that comes twice counts once."""
        self._owners: dict[str, str] = {}
        """Rollout by the id of a span or function in it."""

    def read(self, raw: bytes) -> None:
        """Read one line. Raises _Unusable or ValidationError and then ignores the line."""
        try:
            found = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise _Unusable(f"not valid JSON: {error}; correct the line") from error
        if not isinstance(found, dict):
            raise _Unusable("not a JSON object; write one a line")
        _check_depth(raw, found)
        named = bool(STEP_KEYS & found.keys()) or found.get("rollout_id") is not None
        is_repeatable = named or found.get("session_id") is not None
        digest = hashlib.sha256(raw.strip()).digest()
        if is_repeatable and digest in self._seen:
            return
        self._take(found)
        self._seen.add(digest)

    def _take(self, found: dict[str, Any]) -> None:
        if STEP_KEYS & found.keys():
            step = IntermediateStep.model_validate(found)
            _check_inputs(_question_of([step]))
            self._gathered(self._owner(step)).steps.append(step)
        elif is_document(found):
            self._take_rollout(self._further(rollout_line(found)))
        elif "rollout_id" in found or "steps" in found:
            self._take_rollout(found)
        else:
            raise _Unusable("expected an intermediate step (payload, ...) or a rollout (rollout_id, steps, reward)")

    def _further(self, line: dict[str, Any]) -> dict[str, Any]:
        """A document's line, without the question if its rollout has an example from an earlier document."""
        before = self.rollouts.get(line["rollout_id"]) if "rollout_id" in line else None
        known = before is not None and (before.inputs or before.example_id is not None)
        return {key: value for key, value in line.items() if key != "inputs"} if known else line

    def named(self) -> Iterator[tuple[str, _Gathered]]:
        """All rollouts; one without a name has its number among all, or the next one that no other has."""
        taken = {name for name in self.rollouts if isinstance(name, str)}
        for number, (name, gathered) in enumerate(self.rollouts.items(), 1):
            if isinstance(name, int):
                name = next(free for count in itertools.count(number) if (free := f"rollout-{count}") not in taken)
                taken.add(name)
            yield name, gathered

    def _gathered(self, name: str | int) -> _Gathered:
        return self.rollouts.setdefault(name, _Gathered())

    def _owner(self, step: IntermediateStep) -> str:
        """The rollout of a step: that of its span, of the enclosing span or function, or a new one.

        A workflow that begins in no span is a new one, although its function may have the id of an earlier run's.
        """
        payload, node = step.payload, step.function_ancestry
        provided = (payload.metadata or {}).get("provided_metadata")
        named = provided.get(self._key) if isinstance(provided, dict) else None
        is_root = payload.event_type == IntermediateStepType.WORKFLOW_START
        begins = is_root and step.parent_id == "root" and bool(payload.UUID) and payload.UUID not in self._owners
        around = () if begins else (payload.UUID, step.parent_id, node.function_id, node.parent_id)
        known = next((self._owners[span] for span in around if span in self._owners), None)
        name = str(named) if named else known or (payload.UUID if is_root else step.parent_id) or "steps"
        for span in (payload.UUID, node.function_id):
            if span and span != "root" and (begins or span not in self._owners):
                self._owners[span] = name
        return name

    def _take_rollout(self, found: dict[str, Any]) -> None:
        unknown = sorted(found.keys() - ROLLOUT_KEYS)
        if unknown:
            raise _Unusable(f"unknown key {unknown[0]!r}; known keys: {', '.join(sorted(ROLLOUT_KEYS))}")
        name = found.get("rollout_id")
        name = len(self.rollouts) if name is None else str(name)
        if "step" in found and "steps" in found:
            raise _Unusable("both step and steps; give the one step as one of steps")
        raw_steps = [found["step"]] if "step" in found else found.get("steps", [])
        if not isinstance(raw_steps, list):
            raise _Unusable("steps: must be a list")
        steps = [IntermediateStep.model_validate(step) for step in raw_steps]
        rewards, by_step = _rewards(found), _numbers(found, "step_rewards")
        inputs = _inputs(found)
        example = {} if found.get("example_id") is None else {"example_id": str(found["example_id"])}
        before = self.rollouts.get(name, _Gathered())
        example_before = {} if before.example_id is None else {"example_id": before.example_id}
        where = f"on an earlier line of {name}"
        _check_same("reward ", rewards, before.rewards, where)
        _check_same("step reward ", by_step, before.step_rewards, where)
        _check_same("input ", inputs, before.inputs, where)
        _check_same("", example, example_before, where)
        example_id = example.get("example_id", before.example_id)
        own = before.inputs | inputs
        of_example = self.inputs.get(example_id, {}) if example_id is not None else {}
        _check_same("input ", own, of_example, f"on an earlier line of example {example_id}")
        _check_inputs(of_example | (own or _question_of(steps)))
        if example_id is not None:
            self.inputs[example_id] = of_example | own
        gathered = self._gathered(name)
        gathered.steps += steps
        gathered.rewards |= rewards
        gathered.step_rewards |= by_step
        gathered.inputs |= inputs
        gathered.example_id = example_id
        if found.get("error") is not None:
            gathered.error = str(found["error"])


def _check_same(kind: str, given: Mapping[str, object], before: Mapping[str, object], where: str) -> None:
    """Raises _Unusable for a value that another one contradicts."""
    for key, value in given.items():
        if key in before and before[key] != value:
            raise _Unusable(f"{kind}{key!r} is {value!r}, and {before[key]!r} {where}; give it once")


def _check_depth(raw: bytes, found: dict[str, Any]) -> None:
    """Raises _Unusable for a line that JSON can be read from but, within a record, not written to again."""
    if raw.count(b"[") + raw.count(b"{") < FEW_NESTED:
        return
    within: object = found
    for _ in range(LEVELS_AROUND):
        within = [within]
    try:
        orjson.dumps(within)
    except orjson.JSONEncodeError as error:
        raise _Unusable("nested too deeply to be recorded; use fewer levels of lists and objects") from error


def _rollout(name: str, gathered: _Gathered, selection: Selection) -> RecordedRollout:
    """The rollout of the collected lines; inconsistent lines give it an error."""
    error = gathered.error if gathered.error is not None else None if gathered.steps else "no steps were recorded"
    if error is not None:
        return RecordedRollout(source_id=name, error=error)
    try:
        steps = recorded_steps(gathered.steps, selection)
    except DecodeError as reason:
        return RecordedRollout(source_id=name, error=str(reason))
    except (TypeError, ValueError) as reason:  # of values that a log cannot hold
        return RecordedRollout(source_id=name, error=f"the steps cannot be recorded: {describe(reason)}")
    index_of = {step.uuid: index for index, step in enumerate(steps)}
    missing = [uuid for uuid in gathered.step_rewards if uuid not in index_of]
    if missing:
        return RecordedRollout(source_id=name, error=f"step_rewards: no step has the UUID {missing[0]}")
    by_step = [
        RecordedReward(value=value, name="step_reward", step=index_of[uuid])
        for uuid, value in gathered.step_rewards.items()
    ]
    given = [RecordedReward(value=value, name=name) for name, value in gathered.rewards.items()]
    rewards = (*given, *by_step, *scores(steps, selection))
    return RecordedRollout(source_id=name, steps=tuple(steps), rewards=rewards)


def _rewards(found: dict[str, Any]) -> dict[str, float]:
    reward = found.get("reward")
    by_name = {} if reward is None else reward if isinstance(reward, dict) else {"reward": reward}
    own, others = _numbers({"reward": by_name}, "reward"), _numbers(found, "rewards")
    _check_same("reward ", others, own, "as the line's reward")
    return own | others


def _numbers(found: dict[str, Any], key: str) -> dict[str, float]:
    values = found.get(key) or {}
    if not isinstance(values, dict):
        raise _Unusable(f"{key} must be an object of numbers")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _Unusable(f"{key}.{name} is {value!r}; expected a finite number")
    return {name: float(value) for name, value in values.items()}


def _inputs(found: dict[str, Any]) -> dict[str, JsonValue]:
    inputs = found.get("inputs") or {}
    if not isinstance(inputs, dict):
        raise _Unusable("inputs must be an object")
    return {**inputs, **{key: found[key] for key in ("question", "answer") if key in found}}


def _check_inputs(inputs: Mapping[str, JsonValue]) -> None:
    """Raises _Unusable for inputs that no task can hold beside the rollouts."""
    if INPUT in inputs:
        raise _Unusable(f"an input is named {INPUT!r}, the key of the recorded rollouts; rename it")
    if inputs and (size := len(orjson.dumps(inputs))) > MAX_OWN_BYTES:
        raise _Unusable(
            f"the example has {size} bytes of inputs, more than {MAX_OWN_BYTES}; move large values into a file and "
            "refer to it"
        )


def _question_of(steps: Iterable[IntermediateStep]) -> dict[str, JsonValue]:
    """The input of the steps' workflow."""
    for step in steps:
        payload = step.payload
        if (
            payload.event_type == IntermediateStepType.WORKFLOW_START
            and payload.data
            and payload.data.input is not None
        ):
            return {"question": payload.data.input}
    return {}


def _example_of(gathered: _Gathered) -> str | None:
    """The id of an example without one, derived from its inputs."""
    inputs = gathered.inputs or _question_of(gathered.steps)
    if not inputs:
        return None
    return "x-" + hashlib.sha256(orjson.dumps(inputs, option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]


def _untrained(steps: Sequence[RecordedStep], *, retokenise: bool) -> Counter[str]:
    found: Counter[str] = Counter()
    for step in steps:
        if step.event_type != "LLM_END" and step.chat is None:
            continue
        if step.untrained is not None:
            found[step.untrained] += 1
        elif step.tokens is None and not (retokenise and step.chat is not None):
            found["no_token_ids"] += 1
    return found


def _reason(error: Exception) -> str:
    return str(first_invalid(error) if isinstance(error, ValidationError) else error)
