"""Prints intermediate steps as an installed NAT dumps them: one of each type, then those of a LangChain agent's run."""

import asyncio
from typing import Any

from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from nat.builder.context import Context
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.data_models.intermediate_step import (
    IntermediateStep,
    IntermediateStepPayload,
    IntermediateStepType,
    StreamEventData,
    TraceMetadata,
    TTCEventData,
    UsageInfo,
)
from nat.data_models.invocation_node import InvocationNode
from nat.data_models.token_usage import TokenUsageBaseModel
from nat.plugins.langchain.callback_handler import LangchainProfilerHandler

IDS = {"prompt_token_ids": [5, 6], "token_ids": [7], "model_group": "run-1/policy", "version": 3}
LOGPROBS = {"content": [{"token": "4", "bytes": None, "logprob": -0.5, "top_logprobs": []}], "refusal": None, **IDS}


DATAS_OWN: dict[str, Any] = {"more": 1}
METADATAS_OWN: dict[str, Any] = {"own": 2}
PAYLOADS_OWN: dict[str, Any] = {"weight_version": 3}
"""Keys that NAT lets stand beside its fields."""


class Model(BaseChatModel):
    """Asks for a tool, then answers."""

    num_calls: int = 0

    @property
    def _llm_type(self):
        return "scripted"

    def _get_ls_params(self, stop=None, **options):
        return LangSmithParams(ls_model_name="my-model", ls_provider="none", ls_model_type="chat")

    def _generate(self, messages, stop=None, run_manager=None, **options):
        self.num_calls += 1
        calls = [{"name": "add", "args": {"a": 1}, "id": "c1"}] if self.num_calls == 1 else []
        reported = {
            "logprobs": LOGPROBS | {"prompt_token_ids": [5, 6] if calls else [5, 6, 7, 8]},
            "model_name": "my-model",
        }
        usage = {"input_tokens": 2, "output_tokens": 1, "total_tokens": 3}
        message = AIMessage("" if calls else "4", tool_calls=calls, response_metadata=reported, usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=message)], llm_output={"model_name": "my-model"})


@tool
def add(a: int) -> str:
    """Adds one."""
    return str(a + 1)


def one_of_each():
    """A full step of every type; a TTC step has data of its own."""
    for number, kind in enumerate(IntermediateStepType):
        ttc = TTCEventData(turn_id="t", turn_index=0, candidate_index=1, score=0.5, input=[1], output="x")
        data = (
            ttc
            if "TTC" in kind
            else StreamEventData(input={"a": [1]}, output="x", chunk=None, payload={"b": 2}, **DATAS_OWN)
        )
        metadata = TraceMetadata(tool_inputs={"x": 1}, **METADATAS_OWN) if number % 2 else {"anything": [1, None]}
        payload = IntermediateStepPayload(
            event_type=kind,
            event_timestamp=12.5 + number,
            span_event_timestamp=11.25 if kind.endswith("_END") else None,
            framework=list(LLMFrameworkEnum)[number % len(LLMFrameworkEnum)],
            name=f"n{number}",
            tags=["a"],
            metadata=metadata,
            data=data,
            usage_info=UsageInfo(token_usage=TokenUsageBaseModel(prompt_tokens=number), num_llm_calls=1),
            UUID=f"u{number}",
            **PAYLOADS_OWN,
        )
        node = InvocationNode(function_id="f", function_name="<workflow>", parent_id="root", parent_name="root")
        yield IntermediateStep(parent_id="root", function_ancestry=node, payload=payload)
        yield IntermediateStep(
            parent_id="p",
            function_ancestry=InvocationNode(function_id="f", function_name="g"),
            payload=IntermediateStepPayload(event_type=kind),
        )


async def agents_run():
    """A workflow that asks a model, a tool and the model again, through NAT's own step manager and handler."""
    steps = []
    context = Context.get()
    manager = context.intermediate_step_manager
    manager.subscribe(on_next=steps.append)
    reported = TraceMetadata(provided_metadata={"workflow_run_id": "r1", "conversation_id": None})
    start, end = IntermediateStepType.WORKFLOW_START, IntermediateStepType.WORKFLOW_END
    manager.push_intermediate_step(
        IntermediateStepPayload(
            UUID="w", event_type=start, name="a", data=StreamEventData(input="1+1"), metadata=reported
        )
    )
    with (
        context.push_active_function("<workflow>", input_data="1+1"),
        context.push_active_function("inner", input_data=1),
    ):
        model = Model()
        seen: RunnableConfig = {"callbacks": [LangchainProfilerHandler()]}
        sent = [SystemMessage("be brief"), HumanMessage([{"type": "text", "text": "1+1"}])]
        asked = await model.ainvoke(sent, config=seen)
        added = await add.ainvoke({"type": "tool_call", "name": "add", "args": {"a": 1}, "id": "c1"}, config=seen)
        await model.ainvoke([*sent, asked, added], config=seen)
    manager.push_intermediate_step(
        IntermediateStepPayload(UUID="w", event_type=end, name="a", data=StreamEventData(output="4"))
    )
    return steps


for step in [*one_of_each(), *asyncio.run(agents_run())]:
    print(step.model_dump_json())
