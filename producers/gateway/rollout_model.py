"""The model as the calls of one rollout ask it: the agent that speaks, its prompt, its answers, and their records.

Token-exact over calls: an answer with tool calls that a client gives back parsed goes into the prompt as the model
wrote it. Which calls are repeated, and when the rollout ends, is up to `played`.
"""

import functools
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from rollstream.producers.engines.base import Engine, Generation, Tokenizer
from rollstream.producers.gateway.call_keys import CallIdentity
from rollstream.producers.openai import offered_tools
from rollstream.producers.openai.completions import CompletionRequest
from rollstream.producers.openai.options import is_alias
from rollstream.producers.openai.protocol import Answer, answer_of, stop_length
from rollstream.producers.openai.requests import ENGINE_ERROR, ChatRequest, Refusal
from rollstream.producers.openai.responses import PREFIX, TEXT_PREFIX, RespondedRequest, unknown_item
from rollstream.producers.openai.stream_words import Answered
from rollstream.producers.openai.streaming import OnText, ParsedStream, TextStream, on_tokens_of
from rollstream.producers.rollout.gateway_interface import CallOptions, cut_to, rendered
from rollstream.producers.rollout.prompts import WrittenAnswers
from rollstream.producers.rollout.reply import Message, Parse, Reply, TurnsExhausted
from rollstream.producers.rollout.session import Session
from rollstream.schemas import ids
from rollstream.schemas.errors import (
    ChatTemplateError,
    EnvironmentRunError,
    ModelError,
    PromptRefusedError,
    PromptTooLongError,
)
from rollstream.schemas.events import StepRecorded
from rollstream.schemas.events.recorded import RecordedStep

RUNS_MODEL = "policy"
"""A name that any rollout's default agent answers to."""

EXHAUSTED = "gateway.max_turns"
"""Name of the step of the first call that was refused because its agent had no turn left."""


@dataclass(slots=True)
class SampledAnswers:
    """The answers that were sampled for a call."""

    replies: list[Reply]
    answered: Answered | None = None
    """The answer, until a client is given it: few ask again, and it can be made of the replies."""


class RolloutModel:
    """Answers the calls of one rollout by its session."""

    def __init__(self, session: Session, engine: Engine, agent: str, aliases: Sequence[str] = ()) -> None:
        """`agent`: who speaks where the model's name names nobody else; `aliases`: patterns of such names."""
        self.session = session
        self.exhausted: TurnsExhausted | None = None
        """The first refusal of a call for which there was no turn left."""
        self._engine = engine
        self._agent = agent
        self._aliases = aliases
        self._responses: dict[str, int] = {}
        """Steps of the calls that a later one may go on from, by id."""
        self._texts: dict[str, str] = {}
        """Their texts by id, as clients were given them."""
        self._written = WrittenAnswers()

    def keep_text(self, reply: Reply, step: StepRecorded, metadata: Mapping[str, Any]) -> str:
        """Keep a recorded answer as clients give it back; returns the text that its client was given, if it matters."""
        data: Any = step.data or {}
        tools = data.get("tools", ())
        if reply.generation is None or not (tools or "response_id" in metadata):
            return ""
        answer = self._answer(step.agent, reply, tuple(metadata.get("stop", ())), tools)
        if tools:
            self._keep_written(answer, reply.text, data["input"], tools)
        return answer.text

    def _keep_written(
        self, answer: Answer, text: str, sent: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        for calls in (answer.tool_calls, offered_tools.as_given(answer.tool_calls, tools)):
            self._written.keep(text, answer.text, calls, sent)

    def keep_response(self, step_index: int, metadata: Mapping[str, Any], text: str) -> None:
        """Keep what a later call may name: the response, and the `text` that its client was given."""
        if "response_id" not in metadata:
            return
        for name in (metadata["response_id"], self._call_id(step_index)):
            self._responses[PREFIX + name] = step_index
            self._texts[TEXT_PREFIX + name] = text

    def _call_id(self, step_index: int) -> str:
        return hashlib.sha256(ids.step_id(self.session.rollout_id, step_index).encode()).hexdigest()[:24]

    def described(self, name: str) -> dict[str, Any]:
        """A model in OpenAI's words. Raises Refusal (404)."""
        group = self.session.model_group(self.agent_of(name))
        version = self._engine.version(group)
        found = {"id": name, "object": "model", "created": 0, "owned_by": "rollstream"}
        return found | {"model_group": group, "version": version}

    def all_described(self) -> list[dict[str, Any]]:
        """The models of all agents, that of the default one first."""
        others = [agent for agent in self.session.agents if agent != self._agent]
        return [self.described(agent) for agent in (self._agent, *others)]

    def count(self, asked: ChatRequest) -> int:
        """Number of the prompt's tokens. Raises Refusal."""
        agent = self.agent_of(asked.model)
        try:
            return self.session.count_tokens(self._messages(asked), agent, self._asked(asked, {}))
        except EnvironmentRunError as error:
            raise Refusal(400, str(error), param=asked.PROMPT_KEY) from error

    async def sample(
        self, asked: ChatRequest | CompletionRequest, identity: CallIdentity, agent: str, on_text: OnText | None
    ) -> SampledAnswers:
        """1. The steps are recorded. 2. The log has acknowledged them."""
        metadata: dict[str, Any] = {"body_sha256": identity.body_sha256, "n": asked.n}
        metadata |= {} if isinstance(asked, ChatRequest) else {"is_text": True}
        metadata |= {"stop": list(asked.stop)} if asked.stop else {}
        metadata |= {} if identity.key_sha256 is None else {"key_sha256": identity.key_sha256}
        if isinstance(asked, RespondedRequest):
            metadata |= {"response_id": asked.own_id, "has_instructions": asked.has_instructions}
        deviations = asked.deviations(self.session.sampling)
        deviations |= {} if asked.model in self._agents_by_name else {"model": asked.model}
        metadata |= {"asked": deviations} if deviations else {}
        sent = self._messages(asked)
        try:
            replies = await self.session.sample(sent, asked.n, agent, asked=self._asked(asked, metadata, on_text))
        except TurnsExhausted as error:
            await self._keep_exhausted(error)
            raise Refusal(400, str(error), code="max_turns") from error
        except PromptTooLongError as error:
            raise Refusal(400, str(error), param=asked.PROMPT_KEY, code="context_length_exceeded") from error
        except PromptRefusedError as error:
            raise Refusal(400, str(error), param=error.param or asked.PROMPT_KEY) from error
        except ModelError as error:
            is_final = self.session.failure is not None
            raise Refusal(500, str(error), code=ENGINE_ERROR, is_final=is_final) from error
        except ChatTemplateError as error:
            raise Refusal(400, str(error), param=asked.PROMPT_KEY) from error
        except EnvironmentRunError as error:
            raise Refusal(400, str(error)) from error
        answered = self.answered(asked, replies)
        if tools := _tools_of(asked):
            for reply, answer in zip(replies, answered.answers, strict=True):
                self._keep_written(answer, reply.text, sent, tools)
        await self.session.acknowledged()
        self.keep_response(replies[0].step_index, metadata, answered.answers[0].text)
        return SampledAnswers(replies, answered)

    async def _keep_exhausted(self, error: TurnsExhausted) -> None:
        """Record the first refusal for want of turns: how the rollout ends depends on it, in another process too."""
        try:
            if self.exhausted is None:
                self.exhausted = error
                data: dict[str, Any] = {"error": str(error)}
                step = RecordedStep(event_type="CUSTOM_END", name=EXHAUSTED, data=data, agent=self._agent)
                await self.session.record(step)
            await self.session.acknowledged()
        except EnvironmentRunError as ended:
            raise Refusal(400, str(ended)) from ended

    def answered(self, asked: ChatRequest | CompletionRequest, replies: list[Reply]) -> Answered:
        agent, tools = self.agent_of(asked.model), _tools_of(asked)
        answers = [self._answer(agent, reply, asked.stop, tools) for reply in replies]
        return Answered(answers, self._call_id(replies[0].step_index), replies[0].began_ms // 1000)

    def _answer(self, agent: str, reply: Reply, stop: Sequence[str], tools: Sequence[Mapping[str, Any]]) -> Answer:
        generation, group = reply.generation, self.session.model_group(agent)
        if generation is None:  # a scripted opponent's
            return Answer(reply.text, (), (), (), (), "stop", (), group, 0, step_index=reply.step_index)
        tokenizer = self._engine.tokenizer(group)
        found = answer_of(
            generation,
            tokenizer,
            model_group=group,
            prompt_ids=reply.prompt,
            salt=reply.step_index,
            stop=stop,
            has_tools=bool(tools),
            is_cut=stop_length(generation, tokenizer, stop) is not None,
            parse=self._parse(agent, reply.prompt, tools),
        )
        return replace(found, step_index=reply.step_index)

    def _parse(self, agent: str, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Parse | None:
        return self.session.parser(agent, prompt_ids, tools) if tools else None

    def _asked(
        self, asked: ChatRequest | CompletionRequest, metadata: Mapping[str, Any], on_text: OnText | None = None
    ) -> CallOptions:
        def cut(generation: Generation, tokenizer: Tokenizer) -> Generation:
            length = stop_length(generation, tokenizer, asked.stop)
            return generation if length is None else cut_to(generation, length)

        is_chat = isinstance(asked, ChatRequest)
        on_tokens = None if on_text is None else on_tokens_of([self._stream(asked) for _ in range(asked.n)], on_text)
        return CallOptions(
            tools=_tools_of(asked),
            max_new_tokens=asked.max_completion_tokens or asked.max_tokens,
            cut=cut,
            metadata=metadata,
            text=None if is_chat else self._plain_text(asked),
            token_ids=None if is_chat or isinstance(asked.content, str) else array("i", asked.content),
            on_tokens=on_tokens,
        )

    def _stream(self, asked: ChatRequest | CompletionRequest) -> TextStream | ParsedStream:
        agent, tools = self.agent_of(asked.model), _tools_of(asked)
        tokenizer = self._engine.tokenizer(self.session.model_group(agent))
        if self._parse(agent, (), tools) is None:
            return TextStream(tokenizer, asked.stop, has_tools=bool(tools))
        # Any prompt tells whether the template opens the reasoning.
        text = rendered([{"role": "user", "content": "a"}], tokenizer, CallOptions(tools))
        prompt_ids = tokenizer.encode(text, add_special_tokens=False)
        return ParsedStream(cast(Parse, self._parse(agent, prompt_ids, tools)), asked.stop)

    def _messages(self, asked: ChatRequest | CompletionRequest) -> list[Message]:
        """Messages for the chat template; answers with tool calls are word for word as the model wrote them."""
        if not isinstance(asked, ChatRequest):
            return [{"role": "user", "content": self._plain_text(asked)}]
        messages = [message.for_template() for message in asked.messages]
        for index, name in asked.references.items() if isinstance(asked, RespondedRequest) else ():
            if name not in self._texts:
                raise unknown_item(name)
            messages[index]["content"] = self._texts[name]
        found = self._written.as_written(messages)
        if isinstance(asked, RespondedRequest) and asked.previous_response_id is not None:
            at = int(asked.has_instructions)
            found[at:at] = self._before(asked.previous_response_id)
        return found

    def _before(self, response_id: str) -> list[Message]:
        """Input and output of an earlier response, without its instructions. Raises Refusal (400)."""
        step_index = self._responses.get(response_id)
        if step_index is None:
            raise Refusal(
                400,
                f"previous_response_id: {response_id[:100]!r} is not a response of this rollout; send all messages",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        step = self.session.step(step_index)
        data, metadata = cast(Any, step.data), cast(Any, step.metadata)["gateway"]
        sent = data["input"][int(metadata.get("has_instructions", False)) :]
        return [*sent, {"role": "assistant", "content": data["output"]}]

    def _plain_text(self, asked: CompletionRequest) -> str:
        """The prompt, or what its token ids read as. Raises Refusal (400) for ids that read as nothing."""
        content = asked.content
        if isinstance(content, str):
            return content
        tokenizer = self._engine.tokenizer(self.session.model_group(self.agent_of(asked.model)))
        try:
            return tokenizer.decode(content, skip_special_tokens=False)
        except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise Refusal(
                400, f"prompt: these token ids are not the model's: {error}; use its tokenizer", param="prompt"
            ) from error

    def agent_of(self, model: str) -> str:
        """The agent that a model's name stands for: an agent's own name, a model group's or an alias. Raises Refusal
        (404).
        """
        agents = self._agents_by_name
        if model in agents:
            return agents[model]
        if is_alias(model, self._aliases):
            return self._agent
        known = ", ".join(sorted(agents))
        raise Refusal(
            404, f"model {model!r} is not served here; use one of: {known}", param="model", code="model_not_found"
        )

    @functools.cached_property
    def _agents_by_name(self) -> dict[str, str]:
        session = self.session
        groups = {session.model_group(agent): agent for agent in reversed(session.agents)}
        groups |= {ids.name_of(group): agent for group, agent in groups.items()}
        return {**groups, RUNS_MODEL: self._agent, **{agent: agent for agent in session.agents}}


def _tools_of(asked: ChatRequest | CompletionRequest) -> Sequence[Mapping[str, Any]]:
    return (asked.tools_for_template() or ()) if isinstance(asked, ChatRequest) else ()
