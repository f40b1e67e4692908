"""NAT's own runtime under `rollstream finetune`: its registered functions and evaluators run and score examples.

A failing example is one failed rollout, and so is one that does not end in time: NAT's `EvaluationRun` would skip the
examples after the first and wait for the second. Needs the extra `nat`; NAT is imported where it is used.
"""

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from pydantic import SecretStr
from pydantic_core import PydanticSerializationError, to_jsonable_python

from rollstream.harness.components.interfaces import error_of, score_of
from rollstream.harness.config.dataset import Example
from rollstream.producers.user_tasks import create_task
from rollstream.schemas.errors import describe, retrieve_exception
from rollstream.schemas.events.intermediate_steps import IntermediateStep
from rollstream.schemas.variables import conceal

GRACE_S = 1.0
"""Seconds that code which is cancelled gets to end."""
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class _NotDone(Exception):
    """User code that gave neither a result nor an exception."""


class Played(NamedTuple):
    """The result of one example: its steps and its score, if any; `error`: why the workflow failed."""

    steps: tuple[IntermediateStep, ...] = ()
    score: float | None = None
    error: str | None = None
    missing_score: str | None = None
    """The reason for which there is no score, if the workflow did not fail."""


class Failures:
    """Logs exceptions of a run's workflow and evaluators: all to the log file, only the first to the terminal, because
    one bug would print a traceback per rollout.
    """

    def __init__(self) -> None:
        self._is_told = False

    def report(self, what: str, error: Exception) -> None:
        """Log a failure with its traceback; `what`: the component that failed."""
        if self._is_told:
            logger.info("%s raised", what, exc_info=error)
        else:
            logger.warning("%s raised an exception; further ones are only in the log file", what, exc_info=error)
        self._is_told = True


@asynccontextmanager
async def workflow(config: Any, failures: Failures, limit_s: float) -> AsyncIterator["Workflow"]:
    """The workflow and evaluators of a configuration, built by NAT, with `limit_s` seconds for an example. Their
    exceptions are reported to `failures`.
    """
    from nat.plugins.eval.runtime.builder import WorkflowEvalBuilder
    from nat.runtime.session import SessionManager

    async with WorkflowEvalBuilder.from_config(config=config) as builder:
        limit = config.eval.general.max_concurrency
        sessions = await SessionManager.create(config=config, shared_builder=builder, max_concurrency=limit)
        try:
            yield Workflow(builder, sessions, limit, failures, limit_s)
        finally:
            await sessions.shutdown()


class Workflow:
    """A workflow that NAT has built."""

    def __init__(self, builder: Any, sessions: Any, max_concurrency: int, failures: Failures, limit_s: float) -> None:
        self._builder = builder
        self._sessions = sessions
        self._failures = failures
        self._num_slots = max(1, max_concurrency)
        self._slots = asyncio.Semaphore(self._num_slots)
        self._evaluators: dict[str, _Evaluator] = {}
        self._limit_s = limit_s

    async def play(self, examples: Sequence[Example], evaluator: str) -> list[Played]:
        """Run every example once and score it with an evaluator of the configuration; results in order.

        An example has the limit for its run, and as much for its score, each without the wait for a slot. All calls of
        `play` share the slots: `max_concurrency` of both kinds. An evaluator that takes all examples of a call at a
        time takes a slot for each of them, or all, and has the limit for each round of as many.
        """
        items = [_item(example) for example in examples]
        played = await asyncio.gather(*map(self._run, items))
        done = [item for item, (_, error) in zip(items, played, strict=True) if error is None]
        scores = await self._score(evaluator, done)
        return [
            Played(error=error) if error is not None else scores[str(item.id)]._replace(steps=steps)
            for item, (steps, error) in zip(items, played, strict=True)
        ]

    async def _run(self, item: Any) -> tuple[tuple[IntermediateStep, ...], str | None]:
        async with self._slots:
            try:
                steps = await _limited(self._result(item), self._limit_s)
            except Exception as error:  # noqa: BLE001 -- user code may raise anything
                self._failures.report(f"example {item.id}: the workflow", error)
                return (), _failure("the workflow", error)
        item.trajectory = _nats(steps)
        try:
            return tuple(map(_ours, steps)), None
        except (TypeError, ValueError) as error:
            self._failures.report(f"example {item.id}: its steps", error)
            return (), conceal(f"the workflow's steps cannot be recorded: {describe(error)}")

    async def _result(self, item: Any) -> Any:
        """The steps of an example's run; its output becomes the item's."""
        from nat.builder.runtime_event_subscriber import pull_intermediate

        async with self._sessions.session(user_id=_user()) as session, session.run(item.input_obj) as runner:
            pulled = pull_intermediate()
            try:
                output = await runner.result()
                steps = await pulled
            finally:
                pulled.cancel()
            item.output_obj = _text(runner, output)
        return steps

    async def _score(self, name: str, items: list[Any]) -> dict[str, Played]:
        """Scores by item id, or why there is none."""
        try:
            if name not in self._evaluators:
                self._evaluators[name] = _Evaluator(self._builder.get_evaluator(name), self._num_slots)
            evaluator = self._evaluators[name]
        except Exception as error:  # noqa: BLE001 -- an evaluator of another package may lack what NAT asks of it
            return self._unscored(name, items, error)
        parts = [[item] for item in items] if evaluator.takes_single_items else [items] if items else []
        found = await asyncio.gather(*(self._scores_of(name, evaluator, part) for part in parts))
        return {key: played for part in found for key, played in part.items()}

    def _unscored(self, name: str, items: list[Any], error: Exception) -> dict[str, Played]:
        """Report what an evaluator has raised: the reason why these items have no score."""
        self._failures.report(f"evaluator {name}", error)
        unscored = Played(missing_score=_failure(f"evaluator {name}", error))
        return {str(item.id): unscored for item in items}

    async def _scores_of(self, name: str, evaluator: "_Evaluator", items: list[Any]) -> dict[str, Played]:
        """Scores of one call of an evaluator."""
        try:
            async with evaluator.slots_for(len(items)) as num_rounds:
                output = await _limited(evaluator.evaluate(items), self._limit_s, num_rounds)
            found = {str(item.id): _scored(name, item) for item in output}
        except Exception as error:  # noqa: BLE001 -- user code may raise anything
            return self._unscored(name, items, error)
        left_out = Played(
            missing_score=f"evaluator {name} returned no score for the example; have it return one for each"
        )
        return {key: found.get(key, left_out) for key in (str(item.id) for item in items)}


class _Evaluator:
    """An evaluator that NAT has built, with slots for its evaluations: as many as the run has, or its own
    `max_concurrency` if that is lower.
    """

    def __init__(self, evaluator: Any, num_slots: int) -> None:
        self._takes_trajectories = getattr(evaluator, "evaluate_fn", None) is None
        self._of_all = evaluator.evaluate_atif_fn if self._takes_trajectories else evaluator.evaluate_fn
        self._of_one = _function_of_item(self._of_all)
        own = getattr(getattr(self._of_all, "__self__", None), "max_concurrency", None)
        self._num_slots = max(1, min(num_slots, own)) if isinstance(own, int) else num_slots
        self._slots = asyncio.Semaphore(self._num_slots)
        self._turn = asyncio.Lock()

    @property
    def takes_single_items(self) -> bool:
        """Whether each item is scored on its own."""
        return self._of_one is not None

    @asynccontextmanager
    async def slots_for(self, num_items: int) -> AsyncIterator[int]:
        """A slot for each of these items, or all, in the order of requests; yields the number of rounds needed."""
        num_taken = 0
        try:
            async with self._turn:
                while num_taken < min(num_items, self._num_slots):
                    await self._slots.acquire()
                    num_taken += 1
            yield math.ceil(num_items / self._num_slots)
        finally:
            for _ in range(num_taken):
                self._slots.release()

    async def evaluate(self, items: list[Any]) -> list[Any]:
        """The evaluated items; of one item if this evaluator takes single ones."""
        from nat.data_models.evaluator import EvalInput
        from nat.plugins.eval.runtime.atif_adapter import EvalAtifAdapter

        inputs: Any = EvalInput(eval_input_items=items)
        if self._takes_trajectories:
            inputs = EvalAtifAdapter().build_samples(inputs)
        if self._of_one is not None:
            return [await self._of_one(inputs[0] if self._takes_trajectories else items[0])]
        return (await self._of_all(inputs)).eval_output_items


def _function_of_item(function: Any) -> Callable[[Any], Awaitable[Any]] | None:
    """An evaluator's function of one item if its function of all items only calls that for each: NAT's base classes
    do, and would make a score of 0.0 of an exception.
    """
    from nat.plugins.eval.evaluator.atif_base_evaluator import AtifBaseEvaluator
    from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator

    from rollstream.harness.nat.evaluators import ItemEvaluator

    match getattr(function, "__func__", None):
        case BaseEvaluator.evaluate | ItemEvaluator.evaluate:
            return function.__self__.evaluate_item
        case AtifBaseEvaluator.evaluate_atif_fn:
            return function.__self__.evaluate_atif_item
        case _:
            return None


async def _limited(work: Coroutine[Any, Any, Result], limit_s: float, num_rounds: int = 1) -> Result:
    """The result of user code, which is cancelled after `limit_s` seconds a round; what ignores that goes on by itself.

    Raises what it raises, and _NotDone after that time or if it cancelled itself.
    """
    task = create_task(work)
    try:
        await asyncio.wait({task}, timeout=limit_s * num_rounds)
        if not task.done():
            times = f" for each of {num_rounds} rounds of examples" if num_rounds > 1 else ""
            raise _NotDone(f"timed out after {limit_s * num_rounds:g} s (rollout_timeout_s{times})")
        if task.cancelled():
            raise _NotDone("cancelled itself; catch CancelledError in it")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE_S)
        task.add_done_callback(retrieve_exception)


def _scored(name: str, item: Any) -> Played:
    score = score_of(item)
    if score is not None:
        return Played(score=score)
    reason = error_of(item) or f"{item.score!r} is not a finite number; have it return one"
    return Played(missing_score=conceal(f"evaluator {name} gave no score: {reason}"))


def _failure(what: str, error: Exception) -> str:
    """The reason of a failed rollout, in one line."""
    return conceal(f"{what} {error}" if isinstance(error, _NotDone) else f"{what} raised {describe(error)}")


def _user() -> str:
    from nat.data_models.user_info import BasicUserInfo, UserInfo

    name = f"rollstream-{uuid.uuid4()}"  # workflows with state per user start each example with new state
    return UserInfo(basic_user=BasicUserInfo(username=name, password=SecretStr(name))).get_user_id()


def _item(example: Example) -> Any:
    from nat.data_models.evaluator import EvalInputItem

    inputs = dict(example.inputs)
    return EvalInputItem(
        id=example.example_id,
        input_obj=inputs.get("question"),
        expected_output_obj=inputs.get("answer"),
        full_dataset_entry=inputs,
    )


def _text(runner: Any, output: Any) -> Any:
    """A workflow's output as evaluators see it: text if NAT can convert it."""
    from pydantic import BaseModel

    with suppress(ValueError):
        output = runner.convert(output, to_type=str)
    return output.model_dump_json(indent=2) if isinstance(output, BaseModel) else output


def _ours(step: Any) -> IntermediateStep:
    """A step as the log has it; bytes that are not UTF-8, such as an image, as base64."""
    try:
        plain = to_jsonable_python(step, fallback=str)
    except (PydanticSerializationError, UnicodeDecodeError):
        plain = to_jsonable_python(step.model_dump(), fallback=str, bytes_mode="base64")  # a model has its own mode
    return IntermediateStep.model_validate(plain)


def _nats(steps: Sequence[Any]) -> list[Any]:
    from nat.data_models.intermediate_step import IntermediateStep as NatStep

    return [NatStep.model_validate(step) for step in steps]
