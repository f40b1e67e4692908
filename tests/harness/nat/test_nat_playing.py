"""NAT's runtime plays and scores examples: one that fails fails alone, and no score is ever made up."""

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function
from nat.cli.type_registry import GlobalTypeRegistry
from nat.data_models.evaluator import EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig
from nat.plugins.eval.data_models.evaluator_io import EvalOutput, EvalOutputItem
from nat.plugins.eval.evaluator.atif_base_evaluator import AtifBaseEvaluator
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator

from rollstream.harness.config.dataset import Example
from rollstream.harness.config.nat_workflows import config_of, function_types
from rollstream.harness.nat.nat_runtime import Failures, Played, _ours, workflow
from rollstream.harness.nat.workflow_builder import NatWorkflowBuilder, _rollout, reachable
from rollstream.producers.traces.spans import Selection
from rollstream.schemas.errors import ConfigError
from tests.rigs import nat_samples as nat

NUM_PLAYED: Counter[str] = Counter()
"""Runs of `echo` by question."""
NUM_SCORED_AT_ONCE: Counter[str] = Counter()
"""Calls of an evaluator in progress (`now`) and at most (`most`)."""


class EchoConfig(FunctionBaseConfig, name="playing_test_echo"):
    refuses: str = "no"
    hangs: str = "hang"
    cancels: str = "cancel"
    fails_once: str = "once"


class LengthConfig(EvaluatorBaseConfig, name="playing_test_length"):
    """The output's length; no score for an empty one, and an error for one of a character."""

    raises: bool = False
    hangs: bool = False
    begins_after: int = 0
    """Runs of the workflow that it waits for."""


class AtifConfig(EvaluatorBaseConfig, name="playing_test_atif"):
    """The other way in which NAT's evaluators may be written."""


@asynccontextmanager
async def scoring() -> AsyncIterator[None]:
    NUM_SCORED_AT_ONCE["now"] += 1
    NUM_SCORED_AT_ONCE["most"] = max(NUM_SCORED_AT_ONCE["most"], NUM_SCORED_AT_ONCE["now"])
    yield
    NUM_SCORED_AT_ONCE["now"] -= 1


class SingleConfig(EvaluatorBaseConfig, name="playing_test_single"):
    """An evaluator that is derived from one of NAT's base classes, which call it for each example on its own."""

    of_trajectories: bool | None = False  # None: it has no function at all


async def length_of(output: str) -> float:
    if output == "stuck":
        await asyncio.Event().wait()
    if output == "bad":
        raise ValueError("not bad")
    async with scoring():
        await asyncio.sleep(0.01)
    return float(len(output))


async def length_unless_stuck(rollout: Any) -> float:
    return await length_of(rollout.inputs["question"])


async def scored(item_id: str, output: str) -> EvalOutputItem:
    if output == "none":
        return EvalOutputItem(id=item_id, score=0.0, reasoning={"error": "the answer has no number"})
    return EvalOutputItem(id=item_id, score=await length_of(output), reasoning={})


class OfSingleItems(BaseEvaluator):
    async def evaluate_item(self, item: Any) -> EvalOutputItem:
        return await scored(item.id, item.output_obj)


class OfSingleTrajectories(AtifBaseEvaluator):
    async def evaluate_atif_item(self, sample: Any) -> EvalOutputItem:
        return await scored(sample.item_id, sample.output_obj)


EIGHT: dict[asyncio.AbstractEventLoop, asyncio.Barrier] = {}


async def in_eights(rollout: Any) -> float:
    async with scoring():
        await EIGHT.setdefault(asyncio.get_running_loop(), asyncio.Barrier(8)).wait()
    return 1.0


def register() -> None:
    if "playing_test_echo" in {one.config_type.static_type() for one in _known()}:
        return

    @register_function(config_type=EchoConfig)
    async def echo(config: EchoConfig, builder: Any) -> AsyncIterator[Any]:
        async def play(question: str) -> str:
            """The question."""
            NUM_PLAYED[question] += 1
            if question == config.refuses:
                raise ValueError(f"cannot play {question}")
            if question == config.fails_once and NUM_PLAYED[question] == 1:
                raise ConnectionRefusedError("the endpoint starts again")
            if question == config.cancels:
                raise asyncio.CancelledError("Cancelled by cancel scope 7f")
            if question == config.hangs:
                await asyncio.Event().wait()
            return question

        yield FunctionInfo.from_fn(play, description="echo")

    @register_evaluator(config_type=LengthConfig)
    async def length(config: LengthConfig, builder: Any) -> AsyncIterator[Any]:
        async def evaluate(eval_input: Any) -> EvalOutput:
            if config.raises:
                raise KeyError("no such column")
            if config.hangs:
                await asyncio.Event().wait()
            while NUM_PLAYED.total() < config.begins_after:
                await asyncio.sleep(0)
            async with scoring():
                for _ in range(100):  # in which another call would begin
                    await asyncio.sleep(0)
            items = [_item(item) for item in eval_input.eval_input_items]
            return EvalOutput(average_score=None, eval_output_items=items)

        function: Any = evaluate
        yield EvaluatorInfo(config=config, evaluate_fn=function, description="length")

    @register_evaluator(config_type=AtifConfig)
    async def atif(config: AtifConfig, builder: Any) -> AsyncIterator[Any]:
        class ByTrajectory:
            async def evaluate_atif_fn(self, samples: Any) -> EvalOutput:
                items = [EvalOutputItem(id=one.item_id, score=0.5, reasoning={}) for one in samples]
                return EvalOutput(average_score=0.5, eval_output_items=items)

        yield ByTrajectory()

    @register_evaluator(config_type=SingleConfig)
    async def single(config: SingleConfig, builder: Any) -> AsyncIterator[Any]:
        if config.of_trajectories:
            yield OfSingleTrajectories(3)
        else:
            function: Any = None if config.of_trajectories is None else OfSingleItems(3).evaluate
            yield EvaluatorInfo(config=config, evaluate_fn=function, description="single")


def _known() -> Any:
    return GlobalTypeRegistry.get().get_registered_functions()


def _item(item: Any) -> EvalOutputItem:
    output = str(item.output_obj)
    error = "too short" if len(output) == 1 else None
    return EvalOutputItem(id=item.id, score=float(len(output)) if output else None, reasoning={}, error=error)


def played(
    questions: list[str], evaluator: dict[str, Any], failures: Failures | None = None, limit_s: float = 60.0
) -> list[Played]:
    return generations(1, questions, evaluator, failures, limit_s)[0]


def generations(
    num: int,
    questions: list[str],
    evaluator: dict[str, Any],
    failures: Failures | None = None,
    limit_s: float = 60.0,
) -> list[list[Played]]:
    register()
    NUM_SCORED_AT_ONCE.clear()
    NUM_PLAYED.clear()
    config = config_of({"workflow": {"_type": "playing_test_echo"}, "eval": {"evaluators": {"it": evaluator}}})
    examples = [Example(f"x{number}", {"question": question}) for number, question in enumerate(questions)]

    async def play() -> list[list[Played]]:
        async with asyncio.timeout(120), workflow(config, failures or Failures(), limit_s) as built:
            return await asyncio.gather(*(built.play(examples, "it") for _ in range(num)))

    return asyncio.run(play())


def test_an_example_that_raises_fails_alone_and_the_others_are_scored_in_their_order() -> None:
    found = played(["three", "no", "", "x"], {"_type": "playing_test_length"})
    assert [one.score for one in found] == [5.0, None, None, None]
    assert [one.error is None for one in found] == [True, False, True, True]
    assert [one.missing_score for one in found] == [
        None,
        None,
        "evaluator it gave no score: None is not a finite number; have it return one",
        "evaluator it gave no score: too short",
    ]
    assert re.fullmatch(r"the workflow raised ValueError \(.* in play\): cannot play no", str(found[1].error))
    assert {step.payload.event_type for step in found[0].steps} >= {"WORKFLOW_START", "WORKFLOW_END"}


@pytest.mark.parametrize(
    ("question", "reported"),
    [
        ("hang", "the workflow timed out after 1 s (rollout_timeout_s)"),
        ("cancel", "the workflow cancelled itself; catch CancelledError in it"),
    ],
)
def test_an_example_that_does_not_end_or_cancels_itself_fails_alone(question: str, reported: str) -> None:
    found = played(["three", question], {"_type": "playing_test_length"}, limit_s=1.0)
    assert found[0].score == 5.0
    assert found[1].error == reported


def test_an_evaluator_that_does_not_end_scores_no_example() -> None:
    found = played(["one", "two"], {"_type": "playing_test_length", "hangs": True}, limit_s=1.0)
    assert [one.missing_score for one in found] == ["evaluator it timed out after 1 s (rollout_timeout_s)"] * 2


def test_an_evaluator_that_raises_scores_no_example_and_is_named() -> None:
    found = played(["one", "two"], {"_type": "playing_test_length", "raises": True})
    for one in found:
        assert re.fullmatch(
            r"evaluator it raised KeyError \(.* in evaluate\): 'no such column'", str(one.missing_score)
        )


@pytest.mark.parametrize(("num_generations", "num_examples"), [(2, 16), (8, 1)])
def test_all_generations_share_the_slots_of_our_evaluators(num_generations: int, num_examples: int) -> None:
    evaluator = {"_type": "rollstream_python", "function": f"python:{__name__}.in_eights"}
    for found in generations(num_generations, ["x"] * num_examples, evaluator, limit_s=20.0):
        assert [(one.score, one.missing_score) for one in found] == [(1.0, None)] * num_examples
    assert NUM_SCORED_AT_ONCE["most"] == 8, "eval.general.max_concurrency"


@pytest.mark.parametrize(("num_examples", "num_at_once"), [(1, 8), (4, 2), (5, 1), (9, 1)])
def test_an_evaluator_of_all_examples_at_a_time_takes_a_slot_for_each(num_examples: int, num_at_once: int) -> None:
    evaluator = {"_type": "playing_test_length", "begins_after": 8 * num_examples}
    for found in generations(8, ["three"] * num_examples, evaluator):
        assert [one.score for one in found] == [5.0] * num_examples
    assert NUM_SCORED_AT_ONCE["most"] == num_at_once


@pytest.mark.parametrize("of_trajectories", [False, True])
def test_an_evaluator_derived_from_nats_base_classes_scores_as_many_as_it_allows(of_trajectories: bool) -> None:
    evaluator = {"_type": "playing_test_single", "of_trajectories": of_trajectories}
    found = generations(2, ["three", "four", "sixsix"], evaluator)
    assert [[one.score for one in played] for played in found] == [[5.0, 4.0, 6.0]] * 2
    assert NUM_SCORED_AT_ONCE["most"] == 3, "its own max_concurrency"


@pytest.mark.parametrize(
    "evaluator",
    [
        {"_type": "rollstream_python", "function": f"python:{__name__}.length_unless_stuck"},
        {"_type": "playing_test_single"},
        {"_type": "playing_test_single", "of_trajectories": True},
    ],
)
def test_only_the_example_whose_score_does_not_end_has_none(evaluator: dict[str, Any]) -> None:
    for found in generations(2, ["three", "stuck", "four"], evaluator, limit_s=1.0):
        assert [one.score for one in found] == [5.0, None, 4.0]
        assert found[1].missing_score == "evaluator it timed out after 1 s (rollout_timeout_s)"


@pytest.mark.parametrize("of_trajectories", [False, True])
def test_only_the_example_for_which_a_derived_evaluator_raises_has_no_score(of_trajectories: bool) -> None:
    evaluator = {"_type": "playing_test_single", "of_trajectories": of_trajectories}
    found = played(["three", "bad", "four", "none"], evaluator)
    assert [(one.score, one.missing_score is None) for one in found] == [
        (5.0, True),
        (None, False),
        (4.0, True),
        (0.0, True),
    ]
    assert re.fullmatch(r"evaluator it raised ValueError \(.* in length_of\): not bad", str(found[1].missing_score))


def test_an_evaluator_without_a_function_scores_no_example() -> None:
    found = played(["x", "y"], {"_type": "playing_test_single", "of_trajectories": None})
    assert ["evaluator it raised AttributeError" in str(one.missing_score) for one in found] == [True, True]


def test_the_terminal_shows_the_first_failure_and_the_log_file_all(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    with caplog.at_level("INFO", logger="rollstream"):
        played(["no", "no", "x"], {"_type": "playing_test_length", "raises": True}, failures)
        played(["no"], {"_type": "playing_test_length"}, failures)
    logged = [record for record in caplog.records if record.name.startswith("rollstream")]
    assert [record.levelname for record in logged] == ["WARNING", "INFO", "INFO", "INFO"]
    assert all(record.exc_info for record in logged)
    assert (
        logged[0].getMessage() == "example x0: the workflow raised an exception; further ones are only in the log file"
    )
    assert logged[2].getMessage() == "evaluator it raised"


def test_evaluators_of_whole_trajectories_are_asked_as_nat_asks_them() -> None:
    assert [one.score for one in played(["one", "two"], {"_type": "playing_test_atif"})] == [0.5, 0.5]


def test_registered_functions_are_known_by_name_and_an_invalid_block_shows_no_value() -> None:
    register()
    assert "playing_test_echo" in function_types()
    secret = {"_type": "openai", "model_name": 5, "api_key": ["sk-very-secret"]}
    with pytest.raises(ConfigError, match=r"NAT refuses the file: llms\.l\.") as caught:
        config_of({"workflow": {"_type": "playing_test_echo"}, "llms": {"l": secret}})
    assert "sk-very-secret" not in str(caught.value)


def test_a_step_with_bytes_that_are_not_text_is_recorded_in_base64() -> None:
    (step,) = nat.read([nat.tool("t", "2")[-1]])
    assert step.payload.data is not None
    for output, kept in ((b"\xff\xd8", "_9g="), (b"text", "text")):
        step.payload.data.output = {"image": output}
        found = _ours(step).payload.data
        assert found is not None
        assert found.output == {"image": kept}


class WithoutEndpoint(NatWorkflowBuilder):
    """A builder whose file needs no endpoint."""

    evaluator: ClassVar[dict[str, Any]] = {"_type": "playing_test_length"}

    async def _sections(self, handle: Any) -> dict[str, Any]:
        return {"workflow": {"_type": "playing_test_echo"}, "eval": {"evaluators": {"it": self.evaluator}}}


class Unscored(WithoutEndpoint):
    """Its evaluator raises."""

    evaluator: ClassVar[dict[str, Any]] = {"_type": "playing_test_length", "raises": True}


def builder_played(kind: type[WithoutEndpoint], questions: list[str], workspace: Path) -> list[Played]:
    register()
    NUM_PLAYED.clear()
    examples = [Example(question, {"question": question}) for question in questions]
    settings = SimpleNamespace(max_attempts=3, rollout_timeout_s=60.0)
    handle: Any = SimpleNamespace(
        config=SimpleNamespace(finetuning=SimpleNamespace(reward_function=SimpleNamespace(name="it")))
    )
    tasks: Any = [SimpleNamespace(settings=settings, num_rollouts=1)] * len(examples)
    (found,) = asyncio.run(kind(SimpleNamespace(workspace=workspace))._play(handle, tasks, examples))
    return found


def test_a_failed_example_is_played_again_up_to_max_attempts(tmp_path: Path) -> None:
    found = builder_played(WithoutEndpoint, ["three", "once", "no"], tmp_path)
    assert [(one.score, one.error is None) for one in found] == [(5.0, True), (4.0, True), (None, False)]
    assert NUM_PLAYED == {"three": 1, "once": 2, "no": 3}


def test_an_example_that_nobody_could_score_is_recorded_with_the_reason_and_not_played_again(tmp_path: Path) -> None:
    (found,) = builder_played(Unscored, ["three"], tmp_path)
    assert NUM_PLAYED == {"three": 1}
    rollout = _rollout("x0/0", found, Selection())
    assert "evaluator it raised KeyError" in str(rollout.missing_score)
    assert (rollout.rewards, rollout.error, rollout.steps[-1].event_type) == ((), None, "WORKFLOW_END")


def test_an_epoch_waits_for_the_endpoint_until_it_can_be_reached(tmp_path: Path) -> None:
    file = tmp_path / "endpoint-1.json"

    def record(port: int, pid: int | None) -> None:
        file.write_text(json.dumps({"host": "127.0.0.1", "port": port, "pid": pid}))

    async def scenario() -> tuple[str, int]:
        waiting = asyncio.create_task(reachable(file))
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        for pid in (None, os.getpid()):  # of an endpoint that has ended, and of one that was killed
            record(port, pid)
            await asyncio.sleep(0.3)
            assert not waiting.done()
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port):
            return await asyncio.wait_for(waiting, 10), port

    url, port = asyncio.run(scenario())
    assert url == f"http://127.0.0.1:{port}/v1"
