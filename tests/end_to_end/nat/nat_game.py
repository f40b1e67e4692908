"""A package for NAT with a workflow, a function and an evaluator, by the names and fields of NAT's example of ART.

`test_nat_workflow` puts it on the path of `rollstream finetune` with the metadata of an entry point. The workflow plays
two turns against the llm that it is given, asks a function of the file in between, and tells the value of every move by
a custom step; the evaluator weighs these values.
"""

import uuid

from nat.builder.context import Context
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function
from nat.data_models.component_ref import FunctionRef, LLMRef
from nat.data_models.evaluator import EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig
from nat.data_models.intermediate_step import IntermediateStepPayload, IntermediateStepType, TraceMetadata
from nat.plugins.eval.data_models.evaluator_io import EvalOutput, EvalOutputItem

MOVE = "agent_move"
HOPELESS = "Z"
"""A question that the workflow cannot play."""


class OpponentConfig(FunctionBaseConfig, name="nat_game_opponent"):
    says: str = "+"


@register_function(config_type=OpponentConfig)
async def opponent(config, builder):
    async def answer(move: str) -> str:
        """Answer of the other side."""
        return config.says

    yield FunctionInfo.from_fn(answer, description="the other side")


class GameConfig(FunctionBaseConfig, name="rl_with_openpipe_art"):
    player_model: LLMRef
    opponent: FunctionRef | None = None
    max_parser_retries: int = 2


@register_function(config_type=GameConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def game(config, builder):
    llm = await builder.get_llm(config.player_model, wrapper_type=LLMFrameworkEnum.LANGCHAIN)
    other = await builder.get_function(config.opponent) if config.opponent else None

    async def play(question: str) -> str:
        """Two moves."""
        if question == HOPELESS:
            raise RuntimeError("no move was understood")
        messages, answers = [("human", question)], ""
        for _ in range(2):
            reply = await llm.ainvoke(messages)
            answers += reply.content
            push_value(reply.content)
            answer = await other.ainvoke(reply.content) if other else "+"
            messages += [("ai", reply.content), ("human", answer)]
        return answers

    yield FunctionInfo.from_fn(play, description="two moves")


def push_value(answers: str) -> None:
    steps, name = Context.get().intermediate_step_manager, str(uuid.uuid4())
    value = sum(character.isdigit() for character in answers) / max(1, len(answers)) + len(set(answers)) / 1000
    for kind in (IntermediateStepType.CUSTOM_START, IntermediateStepType.CUSTOM_END):
        metadata = TraceMetadata(provided_metadata={"value": value})
        steps.push_intermediate_step(IntermediateStepPayload(event_type=kind, name=MOVE, UUID=name, metadata=metadata))


class ValueConfig(EvaluatorBaseConfig, name="step_value_computation"):
    """Later moves weigh less."""


@register_evaluator(config_type=ValueConfig)
async def value(config, builder):
    async def evaluate(eval_input):
        items = []
        for item in eval_input.eval_input_items:
            moves = [step for step in item.trajectory if step.event_type == IntermediateStepType.CUSTOM_END]
            values = [_metadata(step)["value"] for step in moves if step.payload.name == MOVE]
            score = sum(one * 0.8**index for index, one in enumerate(values))
            items.append(EvalOutputItem(id=item.id, score=score, reasoning={"values": values}))
        mean = sum(item.score for item in items) / max(1, len(items))
        return EvalOutput(average_score=mean, eval_output_items=items)

    # NAT awaits what it declares as a plain function
    yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="value")  # pyright: ignore[reportArgumentType]


def _metadata(step):
    metadata = step.payload.metadata
    found = metadata if isinstance(metadata, dict) else metadata.model_dump()
    return found["provided_metadata"]
