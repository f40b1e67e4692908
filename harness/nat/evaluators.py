"""rollstream's evaluators as evaluators of NAT's own evaluation, under the same `_type` and with the same keys.

What is scored is the workflow's output. An item without a score has an error and counts in no average. Types that
another package has registered under the same name before are left to it.
"""

import os
import types
from collections.abc import AsyncIterator, Callable
from typing import Any

from nat.builder.evaluator import EvaluatorInfo
from nat.cli.register_workflow import register_evaluator
from nat.cli.type_registry import GlobalTypeRegistry
from nat.data_models.evaluator import EvaluatorBaseConfig

from rollstream.producers.rewards import Asked, FinishedRollout, RewardError, evaluate
from rollstream.schemas.evaluators import MODELS
from rollstream.schemas.events import StepRecorded
from rollstream.schemas.settings import RolloutSettings

AGENT = "agent"


class _Unrecorded:
    """NAT's evaluation keeps no log: what judges are asked is taken down by nobody."""

    def clock(self) -> int:
        """Never looked at."""
        return 0

    async def record(self, asked: Asked) -> None:
        """Let it go."""


def register() -> tuple[str, ...]:
    """Register every built-in evaluator whose name is free; returns their names."""
    taken = {info.config_type.static_type() for info in GlobalTypeRegistry.get().get_registered_evaluators()}
    free = tuple(kind for kind in MODELS if kind not in taken)
    for kind in free:
        register_evaluator(config_type=_config_type(kind))(_factory(kind))
    return free


def _config_type(kind: str) -> type[EvaluatorBaseConfig]:
    """The evaluator's own configuration with NAT's base class."""
    model = MODELS[kind]
    return types.new_class(
        f"Nat{model.__name__}",
        (model, EvaluatorBaseConfig),
        {"name": kind},
        lambda namespace: namespace.update({"__module__": __name__, "__doc__": model.__doc__}),
    )


def _factory(kind: str) -> Callable[..., AsyncIterator[EvaluatorInfo]]:
    async def evaluator(config: Any, builder: Any) -> AsyncIterator[EvaluatorInfo]:
        from rollstream.producers.evaluators import reward_of

        block = config.model_dump(mode="json", by_alias=True, exclude_unset=True) | {"_type": kind}
        settings = RolloutSettings(environment="none", evaluators={kind: block})
        chosen = reward_of(kind, settings, os.environ, _Unrecorded())

        async def evaluate_all(eval_input: Any) -> Any:
            return _output([await _item(kind, chosen.function, item) for item in eval_input.eval_input_items])

        # Declared as a plain function there, and awaited all the same.
        score: Any = evaluate_all
        yield EvaluatorInfo(config=config, evaluate_fn=score, description=config.__doc__ or kind)

    return evaluator


async def _item(name: str, function: Any, item: Any) -> Any:
    from nat.plugins.eval.data_models.evaluator_io import EvalOutputItem

    try:
        scores = await evaluate(name, function, _finished(item))
    except RewardError as error:
        return EvalOutputItem(id=item.id, score=None, reasoning={}, error=str(error))
    return EvalOutputItem(id=item.id, score=sum(scores.values()), reasoning={})


def _output(items: list[Any]) -> Any:
    from nat.plugins.eval.data_models.evaluator_io import EvalOutput

    scores = [item.score for item in items if item.score is not None]
    return EvalOutput(average_score=sum(scores) / len(scores) if scores else None, eval_output_items=items)


def _finished(item: Any) -> FinishedRollout:
    """An item of NAT's evaluation as a rollout that is over: one question, one answer."""
    entry = item.full_dataset_entry if isinstance(item.full_dataset_entry, dict) else {}
    inputs = {"question": item.input_obj, "answer": item.expected_output_obj, **entry}
    steps: tuple[StepRecorded, ...] = ()
    messages: tuple[dict[str, Any], ...] = ({"role": "user", "content": item.input_obj},)
    if item.output_obj is not None:
        messages += ({"role": "assistant", "content": item.output_obj},)
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
                data={"output": str(item.output_obj)},
            ),
        )
    return FinishedRollout(inputs, 0, steps, (), {AGENT: messages}, "done")
