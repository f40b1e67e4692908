"""NAT's own runtime under `rollstream finetune`: its registered functions and evaluators run and score examples.

A failing example is one failed rollout, and so is one that does not end in time: NAT's `EvaluationRun` would skip the
examples after the first and wait for the second. Needs the extra `nat`; NAT is imported where it is used.
"""

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
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
        self._scoring = asyncio.Lock()
        self._limit_s = limit_s

    async def play(self, examples: Sequence[Example], evaluator: str) -> list[Played]:
        """Run every example once and score it with an evaluator of the configuration; results in order.

        An example has the limit for its run, without the wait for a slot. The evaluator has as much for each round of
        as many examples as there are slots, without the wait for the other calls of `play`, which it scores in turn.
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
        from nat.data_models.evaluator import EvalInput

        if not items:
            return {}
        num_rounds = math.ceil(len(items) / self._num_slots)
        try:
            async with self._scoring:
                work = self._evaluate(name, EvalInput(eval_input_items=items))
                output = await _limited(work, self._limit_s, num_rounds)
        except Exception as error:  # noqa: BLE001 -- user code may raise anything
            self._failures.report(f"evaluator {name}", error)
            unscored = Played(missing_score=_failure(f"evaluator {name}", error))
            return {str(item.id): unscored for item in items}
        found = {str(item.id): _scored(name, item) for item in output.eval_output_items}
        left_out = Played(
            missing_score=f"evaluator {name} returned no score for the example; have it return one for each"
        )
        return {key: found.get(key, left_out) for key in (str(item.id) for item in items)}

    async def _evaluate(self, name: str, items: Any) -> Any:
        evaluator = self._builder.get_evaluator(name)
        if getattr(evaluator, "evaluate_fn", None) is not None:
            return await evaluator.evaluate_fn(items)
        from nat.plugins.eval.runtime.atif_adapter import EvalAtifAdapter
        from nat.plugins.eval.runtime.eval_harness import EvaluationHarness

        samples = EvalAtifAdapter().build_samples(items)
        return (await EvaluationHarness().evaluate({name: evaluator}, samples))[name]


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
