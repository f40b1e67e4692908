"""A what-if scores the same answer that was scored when the rollout was made."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.recorded.tasks import tasks_of
from rollstream.producers.attempt import run_rollout
from rollstream.producers.engines.base import Generation, GenerationRequest
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.evaluators.builtin import final_answer
from rollstream.producers.rollout.registry import register_environment, register_reward
from rollstream.producers.rollout.rewards import FinishedRollout, NoScoreError, RewardError
from rollstream.producers.rollout.session import Session
from rollstream.replay.assembly import Range
from rollstream.replay.what_if.rewards import Grading, grade
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import GroupStarted, RewardRecorded, RolloutEnded, RolloutStarted, TaskRequested
from rollstream.schemas.events.recorded import (
    RecordedChat,
    RecordedGroup,
    RecordedReward,
    RecordedRollout,
    RecordedStep,
    RecordedTokens,
)
from rollstream.schemas.settings import RolloutSettings
from tests.producers.conftest import GROUP, answers, scripted, task_of

EVALUATORS: dict[str, Any] = {"right": {"_type": "exact_match"}}
INPUTS = {"answer": "plays"}


@register_environment("test_plays_a_candidate")
async def plays_a_candidate(session: Session) -> None:
    """Three answers to one prompt, of which the first one is played."""
    replies = await session.sample([{"role": "user", "content": "?"}], 3)
    await session.score(replies, [float(reply.text == "plays") for reply in replies], selected=0)


def call(output: str, *, tokens: bool = False, chat: bool = True, **metadata: Any) -> RecordedStep:
    """A recorded LLM call; it may tell neither tokens nor messages."""
    messages: tuple[dict[str, Any], ...] = ({"role": "user", "content": "?"},)
    data: dict[str, Any] = {"input": list(messages), "output": output}
    return RecordedStep(
        data=data,
        metadata=metadata or None,
        tokens=RecordedTokens.of([5], [6], [-0.5]) if tokens else None,
        chat=RecordedChat(messages=messages, answer={"role": "assistant", "content": output}) if chat else None,
        untrained=None if tokens else "not_targeted",
    )


def recorded(*steps: RecordedStep) -> TaskRequested:
    group = RecordedGroup.of("x0", [RecordedRollout(steps=steps)], dict(INPUTS))
    settings = RolloutSettings(
        environment="recorded", agents={"agent": GROUP}, rewards=("right",), evaluators=EVALUATORS
    )
    (task,) = tasks_of([group], run_id="run-1", job_id="run-1/rl", epoch=0, settings=settings, time_ms=1)
    return task


def started(task: TaskRequested) -> GroupStarted:
    fields = ("run_id", "time_ms", "group_id", "example_id", "job_id", "epoch", "index", "minimum", "seed")
    return GroupStarted(**{name: getattr(task, name) for name in fields}, size=task.num_rollouts, timeout_ms=1)


TASKS = {
    "a candidate that was played": task_of(
        "test_plays_a_candidate", inputs=INPUTS, rewards=("right",), evaluators=EVALUATORS
    ),
    "a call that is not trained on": recorded(call("other", tokens=True), call("plays")),
    "a call whose messages are not known": recorded(call("other", tokens=True), call("plays", chat=False)),
    "a call with another tool's metadata": recorded(call("plays", tokens=True, gateway={"stop": None})),
    "a call with stop texts that are none": recorded(call("plays", tokens=True, gateway={"stop": [5]})),
}


@pytest.mark.parametrize("what", TASKS)
def test_the_last_answer_is_scored_in_a_run_and_in_its_what_if(what: str, tmp_path: Path) -> None:
    task = TASKS[what]

    async def scenario() -> tuple[list[float], dict[str, float | None]]:
        log, events, clock = MemoryLog(num_partitions=1), list[Event](), itertools.count(1000)
        await log.send(started(task))

        async def emit(event: Event) -> None:
            events.append(event)
            await log.send(event)

        engine = await scripted(tmp_path, answers("plays", "other", "else"))
        await run_rollout(task, member=0, attempt=0, engine=engine, emit=emit, clock=lambda: next(clock))
        assert isinstance(events[-1], RolloutEnded), events[-1]
        now = task.settings.model_copy(update={"rewards": ("again",), "evaluators": {"again": EVALUATORS["right"]}})
        grading = Grading(task.settings, now, {task.group_id: INPUTS})
        end = (await log.end_offsets("steps"))[0]
        found = await grade(log, [Range("run-1", 0, 0, end, frozenset())], grading)
        others = Grading(task.settings, now, {"run-1/rl/e00000/t00009": {}})
        assert await grade(log, [Range("run-1", 0, 0, end, frozenset())], others) == {}
        given = [event.value for event in events if isinstance(event, RewardRecorded) and event.name == "right"]
        return given, found

    given, found = asyncio.run(scenario())
    assert given == [1.0]
    assert list(found.values()) == [1.0]


@register_reward("test_seed")
def seed_of(rollout: FinishedRollout) -> float:
    return float(rollout.seed % 1_000_003)


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_reward_function_gets_the_members_seed_also_where_the_attempts_start_cannot_be_read(
    tmp_path: Path, is_readable: bool
) -> None:
    task = task_of("test_plays_a_candidate", rewards=("test_seed",))

    async def scenario() -> tuple[list[float], dict[str, float | None]]:
        log, events, clock = MemoryLog(num_partitions=1), [started(task), *list[Event]()], itertools.count(1000)

        async def emit(event: Event) -> None:
            events.append(event)

        engine = await scripted(tmp_path, answers("plays", "other", "else"))
        await run_rollout(task, member=1, attempt=0, engine=engine, emit=emit, clock=lambda: next(clock))
        unreadable = [n for n, event in enumerate(events) if isinstance(event, RolloutStarted) and not is_readable]
        await log.send_all(events)
        part = Range("run-1", 0, 0, len(events), frozenset(unreadable))
        now = task.settings.model_copy(update={"reward_weights": {"test_seed": 1.0}})
        given = [event.value for event in events if isinstance(event, RewardRecorded) and event.name == "test_seed"]
        return given, await grade(log, [part], Grading(task.settings, now, {task.group_id: {}}))

    given, found = asyncio.run(scenario())
    assert given == [float(ids.member_seed(task.seed, 1) % 1_000_003)]
    assert list(found.values()) == given


SEEN: list[tuple[str, ...]] = []


@register_reward("test_graded")
def graded(rollout: FinishedRollout) -> float:
    SEEN.append(tuple(rollout.inputs))
    return 5.0


async def what_if(task: TaskRequested, tmp_path: Path, **changes: Any) -> dict[str, float | None]:
    """Rewards of a rollout of the task under other settings."""
    log, clock = MemoryLog(num_partitions=1), itertools.count(1000)
    await log.send(started(task))

    async def emit(event: Event) -> None:
        await log.send(event)

    engine = await scripted(tmp_path, answers("plays", "other", "else"))
    await run_rollout(task, member=0, attempt=0, engine=engine, emit=emit, clock=lambda: next(clock))
    part = Range("run-1", 0, 0, (await log.end_offsets("steps"))[0], frozenset())
    now = task.settings.model_copy(update=changes)
    return await grade(log, [part], Grading(task.settings, now, {task.group_id: task.inputs}))


@pytest.mark.parametrize(
    ("brought", "changes", "reward", "seen"),
    [
        ("test_graded", {"reward_weights": {"test_graded": 2.0}}, 2.0, []),
        ("other", {"rewards": ("test_graded",)}, 6.0, [("answer",)]),
    ],
)
def test_a_reward_that_came_with_a_recorded_rollout_stays_and_no_function_sees_the_recording(
    brought: str, changes: dict[str, Any], reward: float, seen: list[Any], tmp_path: Path
) -> None:
    SEEN.clear()
    given = RecordedReward(value=1.0, name=brought)
    group = RecordedGroup.of("x0", [RecordedRollout(steps=(call("plays"),), rewards=(given,))], dict(INPUTS))
    names = ("test_graded",) if brought == "test_graded" else ()
    settings = RolloutSettings(environment="recorded", agents={"agent": GROUP}, rewards=names)
    (task,) = tasks_of([group], run_id="run-1", job_id="run-1/rl", epoch=0, settings=settings, time_ms=1)
    assert list(asyncio.run(what_if(task, tmp_path, **changes)).values()) == [reward]
    assert seen == SEEN


def test_an_evaluator_named_like_a_reward_that_the_environment_gave_is_refused(tmp_path: Path) -> None:
    changes = {"rewards": ("reward",), "evaluators": {"reward": {"_type": "regex", "pattern": "plays"}}}
    with pytest.raises(RewardError, match=r"eval\.evaluators\.reward: the environment has recorded a reward"):
        asyncio.run(what_if(task_of(), tmp_path, **changes))


@register_reward("test_no_score")
def no_score(rollout: FinishedRollout) -> None:
    return None


@pytest.mark.parametrize(("missing_score", "reward"), [("reject", None), ("unneeded", 0.0)])
def test_a_missing_score_is_a_rejection_or_unneeded_as_in_a_run(
    missing_score: str, reward: float | None, tmp_path: Path
) -> None:
    """Also where the run itself was without a score."""
    for rewards in (("test_no_score",), ("test_seed",)):
        task = task_of("test_plays_a_candidate", rewards=rewards, missing_score=missing_score)
        changes = {"rewards": ("test_no_score",), "reward_weights": {"test_no_score": 2.0}}
        assert list(asyncio.run(what_if(task, tmp_path, **changes)).values()) == [reward]


@pytest.mark.parametrize(("before", "now", "reward"), [("unneeded", "reject", None), ("reject", "unneeded", 0.0)])
def test_another_rule_for_missing_scores_is_a_change_of_its_own(
    before: str, now: str, reward: float | None, tmp_path: Path
) -> None:
    task = task_of("test_plays_a_candidate", rewards=("test_no_score",), missing_score=before)
    other = task.settings.model_copy(update={"missing_score": now})
    assert Grading(task.settings, other, {}).changes_something
    assert list(asyncio.run(what_if(task, tmp_path, missing_score=now)).values()) == [reward]


@register_environment("test_uses_a_tool")
async def uses_a_tool(session: Session) -> None:
    """One agent answers, the other one only has a tool called."""
    await session.chat([{"role": "user", "content": "?"}], agent="agent")
    await session.tool("search", "x", "found", agent="searcher")


@register_reward("test_of_the_agent")
def of_the_agent(rollout: FinishedRollout) -> dict[str, float]:
    return {"agent": 1.0}


def test_an_agent_that_sampled_nothing_needs_no_reward(tmp_path: Path) -> None:
    agents = {"agent": GROUP, "searcher": GROUP}
    task = task_of("test_uses_a_tool", rewards=("test_of_the_agent",), agents=agents)
    found = asyncio.run(what_if(task, tmp_path, reward_weights={"test_of_the_agent": 2.0}))
    assert [reward for name, reward in found.items() if name.endswith("/agent")] == [2.0]


@register_environment("test_asks_an_adviser")
async def asks_an_adviser(session: Session) -> None:
    for agent in ("agent", "adviser"):
        await session.chat([{"role": "user", "content": "?"}], agent=agent)


def test_a_frozen_agent_needs_no_reward(tmp_path: Path) -> None:
    agents = {"agent": GROUP, "adviser": GROUP}
    task = task_of("test_asks_an_adviser", rewards=("test_of_the_agent",), agents=agents, frozen_agents=("adviser",))
    found = asyncio.run(what_if(task, tmp_path, reward_weights={"test_of_the_agent": 2.0}))
    assert [reward for name, reward in found.items() if name.endswith("/agent")] == [2.0]


@register_environment("test_rewards_all")
async def rewards_all(session: Session) -> None:
    for agent in session.agents:
        await session.chat([{"role": "user", "content": "?"}], agent=agent)
    await session.reward(0.3)


@pytest.mark.parametrize("rewards", [(), ("test_of_the_agent",)])
def test_a_reward_of_weight_0_does_not_score_an_agent(rewards: tuple[str, ...], tmp_path: Path) -> None:
    task = task_of("test_rewards_all", agents={"agent": GROUP, "other": GROUP}, rewards=rewards)
    changes = {"rewards": ("test_of_the_agent",), "reward_weights": {"*": 0.0, "test_of_the_agent": 1.0}}
    with pytest.raises(NoScoreError, match="gives no reward to other"):
        asyncio.run(what_if(task, tmp_path, **changes))


@register_environment("test_answers_out_of_order")
async def answers_out_of_order(session: Session) -> None:
    ask = [{"role": "user", "content": "?"}]
    await asyncio.gather(session.chat(ask), session.chat(ask))
    await session.relabel(ask, "label")


@register_reward("test_last_answer")
def last_answer(rollout: FinishedRollout) -> float:
    SEEN.append((str(rollout.messages["agent"][-1]["content"]), final_answer("", rollout)))
    return 1.0


def test_the_last_answer_is_that_of_the_last_call_and_not_a_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, second = ScriptedEngine.generate, list[asyncio.Event]()

    async def first_is_slow(self: ScriptedEngine, request: GenerationRequest) -> Generation:
        if not second:
            second.append(asyncio.Event())
            await second[0].wait()
        found = await generate(self, request)
        second[0].set()
        return found

    monkeypatch.setattr(ScriptedEngine, "generate", first_is_slow)
    SEEN.clear()
    task = task_of("test_answers_out_of_order", rewards=("test_last_answer",))
    asyncio.run(what_if(task, tmp_path, reward_weights={"test_last_answer": 2.0}))
    assert SEEN == [("plays", "plays")] * 2
