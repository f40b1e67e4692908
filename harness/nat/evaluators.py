"""rollstream's evaluators as evaluators of NAT's own evaluation, with the same `_type` and keys.

They score the workflow's output. An item without a score has an error and is not counted in averages. If another
package registers the same name, its evaluator wins; ours are always available as `rollstream_NAME`.
"""

import asyncio
import json
import os
import types
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Literal

from nat.builder.evaluator import EvaluatorInfo
from nat.cli.register_workflow import register_evaluator
from nat.cli.type_registry import GlobalTypeRegistry, RegisteredEvaluatorInfo
from nat.data_models.evaluator import EvalInput, EvalInputItem, EvaluatorBaseConfig
from nat.plugins.eval.data_models.evaluator_io import EvalOutput, EvalOutputItem
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator
from pydantic import Field, computed_field

from rollstream.harness.nat.configs import Explained
from rollstream.producers.rollout.reply import text_of
from rollstream.producers.rollout.rewards import Asked, FinishedRollout, RewardError, evaluate
from rollstream.producers.traces.spans import json_value
from rollstream.schemas.evaluators import LONG, MODELS, SECTION
from rollstream.schemas.events import StepRecorded
from rollstream.schemas.kafka import with_secrets
from rollstream.schemas.permissions import Permissions, named_by
from rollstream.schemas.settings import RolloutSettings

AGENT = "agent"


class _Unrecorded:
    """Discards the records of judge calls, because NAT's evaluation has no log."""

    def clock(self) -> int:
        """Unused."""
        return 0

    async def record(self, asked: Asked) -> None:
        """Discard the record."""


class _ShortName(RegisteredEvaluatorInfo):
    """An evaluator's short name, which yields to another package's evaluator of the same name, whatever the import
    order: NAT drops a short name that is registered twice.
    """

    @computed_field
    @property
    def local_name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The short name that NAT accepts besides the full one."""
        infos = GlobalTypeRegistry.get().get_registered_evaluators()
        others = {info.config_type.static_type() for info in infos if info.config_type is not self.config_type}
        name = self.config_type.static_type()
        return self.full_type if name in others else name


def register() -> None:
    """Register every built-in evaluator, as `rollstream_NAME` and by its short name."""
    for kind in MODELS:
        register_evaluator(config_type=_config_type(kind, f"{LONG}{kind}"))(_factory(kind))
        short = _config_type(kind, kind)
        build = asynccontextmanager(_factory(kind))
        info = _ShortName(full_type=short.full_type, config_type=short, build_fn=build)
        GlobalTypeRegistry.get().register_evaluator(info)


def _config_type(kind: str, name: str) -> type[EvaluatorBaseConfig]:
    """The evaluator's own configuration with NAT's base class."""
    model = MODELS[kind]
    named: dict[str, Any] = {
        # pyright: ignore[reportInvalidTypeForm]
        "__annotations__": {"type": Literal[name, f"{__package__}/{name}"], "SECTION": ClassVar[str]},
        "type": Field(default=name, alias="_type"),
        "SECTION": SECTION,
    }
    return types.new_class(
        f"Nat{model.__name__}",
        (Explained, model, EvaluatorBaseConfig),
        {"name": name},
        lambda namespace: namespace.update({"__module__": __name__, "__doc__": model.__doc__, **named}),
    )


def _factory(kind: str) -> Callable[..., AsyncIterator[EvaluatorInfo]]:
    async def evaluator(config: Any, builder: Any) -> AsyncIterator[EvaluatorInfo]:
        from rollstream.producers.evaluators.table import reward_of

        block = json.loads(with_secrets(config, by_alias=True, exclude_unset=True)) | {"_type": kind}
        settings = RolloutSettings(environment="none", evaluators={kind: block})
        chosen = reward_of(kind, settings, Permissions.of(named_by(settings), os.environ), _Unrecorded())

        built = ItemEvaluator(kind, chosen.function, builder.get_max_concurrency())
        score: Any = built.evaluate  # NAT declares it as a plain function but awaits it
        yield EvaluatorInfo(config=config, evaluate_fn=score, description=config.__doc__ or kind)

    return evaluator


class ItemEvaluator(BaseEvaluator):
    """A built-in evaluator. It scores each item on its own, and returns an item without a score as it is."""

    def __init__(self, name: str, function: Any, max_concurrency: int) -> None:
        super().__init__(max(1, max_concurrency))
        self._name = name
        self._function = function

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """The item's score, or the error for which it has none."""
        try:
            scores = await evaluate(self._name, self._function, _finished(item))
        except RewardError as error:
            return EvalOutputItem(id=item.id, score=None, reasoning={}, error=str(error))
        return EvalOutputItem(id=item.id, score=sum(scores.values()), reasoning={})

    async def evaluate(self, eval_input: EvalInput) -> EvalOutput:
        """The scores of all items and their average, with at most `max_concurrency` evaluations at a time."""
        items = await asyncio.gather(*map(self._in_turn, eval_input.eval_input_items))
        scores = [item.score for item in items if item.score is not None]
        return EvalOutput(average_score=sum(scores) / len(scores) if scores else None, eval_output_items=items)

    async def _in_turn(self, item: EvalInputItem) -> EvalOutputItem:
        async with self.semaphore:
            return await self.evaluate_item(item)


def _finished(item: Any) -> FinishedRollout:
    """An item of NAT's evaluation as a finished rollout with one question and one answer, as JSON if it is not text."""
    entry = item.full_dataset_entry if isinstance(item.full_dataset_entry, dict) else {}
    inputs = {"question": item.input_obj, "answer": item.expected_output_obj, **entry}
    steps: tuple[StepRecorded, ...] = ()
    messages: tuple[dict[str, Any], ...] = ({"role": "user", "content": item.input_obj},)
    if item.output_obj is not None:
        text = text_of(json_value(item.output_obj))
        messages += ({"role": "assistant", "content": text},)
        steps = (
            StepRecorded(
                run_id="nat",
                time_ms=0,
                group_id=f"nat/{item.id}",
                rollout_id=f"nat/{item.id}",
                step_index=0,
                agent=AGENT,
                event_type="LLM_END",
                uuid="nat",
                data={"output": text},
            ),
        )
    return FinishedRollout(inputs, 0, steps, (), {AGENT: messages}, "done")
