"""One rollout that a program outside plays: its calls become steps of its session, each of them once.

A call that is repeated under the same mark (`Idempotency-Key`, or the retry count of OpenAI's and Anthropic's clients)
gets the answer that is recorded, or waits for the one that is on its way. A client that hangs up changes nothing: its
call is recorded, and answered when it is asked for again.
"""

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, cast

import orjson

from rollstream.producers.engines.base import Engine, Generation, Tokenizer
from rollstream.producers.gateway.marks import Mark, RememberedCalls
from rollstream.producers.openai.completions import CompletionRequest
from rollstream.producers.openai.protocol import Answer, answer_of, stop_length
from rollstream.producers.openai.requests import ChatRequest, Refusal
from rollstream.producers.openai.responses import PREFIX, RespondedRequest
from rollstream.producers.openai.stream_words import Answered
from rollstream.producers.openai.streaming import OnText, TextStream, on_tokens_of
from rollstream.producers.rollout.environment import task_of
from rollstream.producers.rollout.outside import CallOptions, cut_to
from rollstream.producers.rollout.reply import Message, Reply, TurnsExhausted
from rollstream.producers.rollout.session import Session
from rollstream.schemas.errors import EnvironmentRunError, ModelError, PromptRefusedError, PromptTooLongError
from rollstream.schemas.events import StepRecorded
from rollstream.schemas.events.recorded import RecordedStep

RUNS_MODEL = "policy"
"""A name that any rollout's default agent answers to."""
CLAIM, END = "gateway.claim", "gateway.end"
"""Names of steps: the rollout was claimed, its agent has ended it."""


class PlayedRollout:
    """Of `rollout.outside.OpenedRollout`, with what its calls, rewards and end do."""

    def __init__(
        self, session: Session, engine: Engine, agent: str, *, base_url: str, key: str, max_calls: int
    ) -> None:
        """`max_calls`: that may be under way at once."""
        self.session = session
        self._max_calls = max_calls
        self.base_url = base_url
        self.key = key
        self._engine = engine
        self._agent = agent
        self._calls = RememberedCalls()
        self._responses: dict[str, int] = {}
        """Steps of the calls that a later one may go on from, by id."""
        self._ending: asyncio.Task[None] | None = None
        self._working: set[asyncio.Task[Any]] = set()
        self._texts: dict[bytes, str] = {}
        """What the model wrote, by the message with tool calls that was made of it."""
        self._rewards: dict[tuple[str, int | None, str | None], float] = {}
        self._end: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._exhausted: TurnsExhausted | None = None
        self.claim_key = ""
        """Digest of the key under which the rollout was claimed."""
        self.is_claimed = False
        self._restore()

    async def call(self, asked: ChatRequest | CompletionRequest, mark: Mark, on_text: OnText | None = None) -> Answered:
        """The answers to a call, once the log has acknowledged them. Raises Refusal.

        `on_text` is told what is sampled now; a recorded answer comes whole.
        """
        task: asyncio.Future[list[Reply]] | None = self._calls.repeated(mark)
        if task is None:
            self._check_open()
            self._check_sampled(asked)
            self._check_room()
            agent = self._agent_of(asked.model)
            task = self._begin(lambda: self._sample(asked, mark, agent, on_text))
            self._calls.add(mark.body_sha256, mark.key_sha256, task)
        replies = await asyncio.shield(task)
        return self._answered(asked, replies)

    async def reward(self, value: float, name: str, step_index: int | None, agent: str | None) -> None:
        """Give a reward; the same again changes nothing. Raises Refusal."""
        place = name, step_index, agent
        given = self._rewards.get(place)
        if given is not None and given != value:
            raise Refusal(409, f"reward {name} was given as {given:g}; it cannot become {value:g}", param="value")
        if given is not None:
            return await self.session.acknowledged()
        self._check_open()
        session = self.session
        if agent is not None and agent not in session.agents:
            raise Refusal(400, f"agent: {agent!r} is unknown; known agents: {', '.join(session.agents)}", param="agent")
        if step_index is not None and not session.has_step(step_index):
            raise Refusal(400, f"step_index: step {step_index} is not recorded", param="step_index")
        self._rewards[place] = value
        await asyncio.shield(self._begin(lambda: self._give(value, name, step_index, agent)))

    async def end(self, error: str | None = None) -> None:
        """The program is done; `error`: it failed. Once ended, it stays as it was. The log has acknowledged it then."""
        if self._end.done():
            return
        if self._ending is None:
            self._ending = self._begin(lambda: self._note(END, {"error": error}))
        await asyncio.shield(self._ending)
        self._set_ended(error)

    async def claim(self, key: str) -> None:
        """Somebody plays the rollout from now on. The log has acknowledged it then."""
        if self.is_claimed:
            return await self.session.acknowledged()
        self.is_claimed = True
        self.claim_key = key
        await asyncio.shield(self._begin(lambda: self._note(CLAIM, {"key_sha256": key})))

    async def _note(self, name: str, data: dict[str, Any]) -> None:
        step = RecordedStep(event_type="CUSTOM_END", name=name, data=data, agent=self._agent)
        await self.session.record(step)
        await self.session.acknowledged()

    def _set_ended(self, error: str | None) -> None:
        if not self._end.done():
            self._end.set_result(error)

    def _restore(self) -> None:
        """Take up what another process has recorded of this rollout."""
        calls: dict[tuple[str, str], list[Reply]] = {}
        for step in self.session.recorded:
            data: Any = step.data or {}
            notes: Any = (step.metadata or {}).get("gateway")
            if step.name == CLAIM:
                self.is_claimed, self.claim_key = True, data["key_sha256"]
            elif step.name == END:
                self._set_ended(data["error"])
            elif notes and step.step_index in self.session.replies:
                reply = self.session.replies[step.step_index]
                found = calls.setdefault((notes["body_sha256"], notes.get("key_sha256", "")), [])
                found[:] = [*found, reply] if len(found) < notes["n"] else [reply]
                self._keep_text(reply, step, notes)
                if len(found) == notes["n"]:
                    self._calls.add(notes["body_sha256"], notes.get("key_sha256"), _done([*found]))
                    self._keep_response(found[0].step_index, notes)
        self._rewards = {(one.name, one.step_index, one.agent): one.value for one in self.session.rewarded}

    def _keep_text(self, reply: Reply, step: StepRecorded, notes: Mapping[str, Any]) -> None:
        generation = reply.generation
        if generation is None or not (step.data or {}).get("tools"):
            return
        tokenizer = self._engine.tokenizer(self.session.model_group(step.agent))
        stop = tuple(notes.get("stop", ()))
        answer = _answer_of(generation, tokenizer, reply.prompt_ids, stop, has_tools=True)
        if answer.tool_calls:
            self._texts[_fingerprint(answer.text, answer.tool_calls)] = reply.text

    def _keep_response(self, step_index: int, notes: Mapping[str, Any]) -> None:
        names = notes.get("response_id", ""), self._call_id(step_index)
        self._responses |= dict.fromkeys((PREFIX + name for name in names), step_index)

    def _call_id(self, step_index: int) -> str:
        return hashlib.sha256(f"{self.session.rollout_id}/s{step_index}".encode()).hexdigest()[:24]

    async def ended(self) -> None:
        """See `OpenedRollout`."""
        error = await asyncio.shield(self._end)
        if error is not None:
            raise EnvironmentRunError(f"the agent reported: {error}")
        await self.settle()

    async def settle(self) -> None:
        """See `OpenedRollout`."""
        self._set_ended(None)
        while self._working:
            await asyncio.wait(set(self._working))
        if self._exhausted is not None:
            raise self._exhausted

    def close(self) -> None:
        """Stop what is under way."""
        self._set_ended(None)
        for task in self._working:
            task.cancel()

    def model(self, name: str) -> dict[str, Any]:
        """A model in OpenAI's words. Raises Refusal (404)."""
        group = self.session.model_group(self._agent_of(name))
        version = self._engine.version(group)
        found = {"id": name, "object": "model", "created": 0, "owned_by": "rollstream"}
        return found | {"model_group": group, "version": version}

    def default_model(self) -> dict[str, Any]:
        """The model of the default agent."""
        return self.model(self._agent)

    def description(self) -> dict[str, Any]:
        """What whoever claims the rollout is told: its task, where to play it, and its key."""
        return task_of(self.session) | {"base_url": self.base_url, "key": self.key}

    def count(self, asked: ChatRequest) -> int:
        """How many tokens the prompt has. Raises Refusal."""
        agent = self._agent_of(asked.model)
        try:
            return self.session.count_tokens(self._messages(asked), agent, self._asked(asked, {}))
        except Exception as error:
            raise _refused_template(error) from error

    def _begin(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work())
        self._working.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._working.discard(task)
        if not task.cancelled():
            task.exception()  # who asked may have hung up

    async def _give(self, value: float, name: str, step_index: int | None, agent: str | None) -> None:
        await self.session.reward(value, name, step_index, agent)
        await self.session.acknowledged()

    async def _sample(
        self, asked: ChatRequest | CompletionRequest, mark: Mark, agent: str, on_text: OnText | None
    ) -> list[Reply]:
        """1. The steps are recorded. 2. The log has acknowledged them."""
        notes: dict[str, Any] = {"body_sha256": mark.body_sha256, "n": asked.n}
        notes |= {} if isinstance(asked, ChatRequest) else {"is_text": True}
        notes |= {"stop": list(asked.stop)} if asked.stop else {}
        notes |= {} if mark.key_sha256 is None else {"key_sha256": mark.key_sha256}
        if isinstance(asked, RespondedRequest):
            notes |= {"response_id": asked.own_id, "has_instructions": asked.has_instructions}
        deviations = asked.deviations(self.session.sampling)
        notes |= {"asked": deviations} if deviations else {}
        try:
            replies = await self.session.sample(
                self._messages(asked), asked.n, agent, asked=self._asked(asked, notes, on_text)
            )
        except TurnsExhausted as error:
            self._exhausted = error
            raise Refusal(400, str(error), code="max_turns") from error
        except PromptTooLongError as error:
            raise Refusal(400, str(error), param=asked.PROMPT_KEY, code="context_length_exceeded") from error
        except PromptRefusedError as error:
            raise Refusal(400, str(error), param=asked.PROMPT_KEY) from error
        except ModelError as error:
            raise Refusal(500, str(error), code="engine_error") from error
        except EnvironmentRunError as error:
            raise Refusal(400, str(error)) from error
        except Exception as error:  # templates are programs of the model's maker and raise what they like
            raise _refused_template(error) from error
        for reply, answer in zip(replies, self._answered(asked, replies).answers, strict=True):
            if answer.tool_calls:
                self._texts[_fingerprint(answer.text, answer.tool_calls)] = reply.text
        await self.session.acknowledged()
        self._keep_response(replies[0].step_index, notes)
        return replies

    def _answered(self, asked: ChatRequest | CompletionRequest, replies: list[Reply]) -> Answered:
        has_tools = isinstance(asked, ChatRequest) and asked.tools_for_template() is not None
        answers = [self._answer(asked, reply, has_tools=has_tools) for reply in replies]
        return Answered(answers, self._call_id(replies[0].step_index), replies[0].began_ms // 1000)

    def _answer(self, asked: ChatRequest | CompletionRequest, reply: Reply, *, has_tools: bool) -> Answer:
        generation, agent = reply.generation, self._agent_of(asked.model)
        group = self.session.model_group(agent)
        if generation is None:  # a scripted opponent's
            return Answer(reply.text, (), (), (), (), "stop", (), group, 0)
        tokenizer = self._engine.tokenizer(group)
        return _answer_of(generation, tokenizer, reply.prompt_ids, asked.stop, has_tools=has_tools)

    def _asked(
        self, asked: ChatRequest | CompletionRequest, notes: Mapping[str, Any], on_text: OnText | None = None
    ) -> CallOptions:
        def cut(generation: Generation, tokenizer: Tokenizer) -> Generation:
            length = stop_length(generation, tokenizer, asked.stop)
            return generation if length is None else cut_to(generation, length)

        is_chat = isinstance(asked, ChatRequest)
        on_tokens = None
        if on_text is not None:
            tokenizer = self._engine.tokenizer(self.session.model_group(self._agent_of(asked.model)))
            has_tools = is_chat and asked.tools_for_template() is not None
            streams = [TextStream(tokenizer, asked.stop, has_tools=has_tools) for _ in range(asked.n)]
            on_tokens = on_tokens_of(streams, on_text)
        return CallOptions(
            tools=(asked.tools_for_template() or ()) if is_chat else (),
            max_new_tokens=asked.max_completion_tokens or asked.max_tokens,
            cut=cut,
            notes=notes,
            text=None if is_chat else self._plain_text(asked),
            token_ids=None if is_chat or isinstance(asked.content, str) else array("i", asked.content),
            on_tokens=on_tokens,
        )

    def _messages(self, asked: ChatRequest | CompletionRequest) -> list[Message]:
        """As the chat template gets them: answers with tool calls word for word as the model wrote them."""
        if not isinstance(asked, ChatRequest):
            return [{"role": "user", "content": self._plain_text(asked)}]
        found: list[Message] = []
        for message in asked.messages:
            calls = message.tool_calls if message.role == "assistant" else None
            written = self._texts.get(_fingerprint(message.content, calls)) if calls else None
            found.append(message.for_template() if written is None else {"role": "assistant", "content": written})
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
                f"previous_response_id: {response_id[:100]!r} is not a response of this rollout; send what came before",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        step = self.session.step(step_index)
        data, notes = cast(Any, step.data), cast(Any, step.metadata)["gateway"]
        said = data["input"][int(notes.get("has_instructions", False)) :]
        return [*said, {"role": "assistant", "content": data["output"]}]

    def _plain_text(self, asked: CompletionRequest) -> str:
        """The prompt, or what its token ids read as. Raises Refusal (400) for ids that read as nothing."""
        content = asked.content
        if isinstance(content, str):
            return content
        tokenizer = self._engine.tokenizer(self.session.model_group(self._agent_of(asked.model)))
        try:
            return tokenizer.decode(content, skip_special_tokens=False)
        except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise Refusal(400, f"prompt: these token ids are not the model's: {error}", param="prompt") from error

    def _agent_of(self, model: str) -> str:
        """The agent that a model's name stands for: an agent's own name, or a model group's. Raises Refusal (404)."""
        session = self.session
        if model in session.agents:
            return model
        groups = {session.model_group(agent): agent for agent in reversed(session.agents)}
        groups |= {group.rpartition("/")[2]: agent for group, agent in groups.items()}
        groups |= {RUNS_MODEL: self._agent}
        if model not in groups:
            known = ", ".join(sorted({*session.agents, *groups}))
            raise Refusal(
                404, f"model {model!r} is not served here; use one of: {known}", param="model", code="model_not_found"
            )
        return groups[model]

    def _check_open(self) -> None:
        if self._end.done():
            raise ended(self.session.rollout_id)

    def _check_room(self) -> None:
        if len(self._working) >= self._max_calls:
            raise Refusal(
                429,
                f"rollout {self.session.rollout_id} has {len(self._working)} calls under way, as many as "
                "gateway.max_concurrent_calls allows; wait for one of them",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )

    def _check_sampled(self, asked: ChatRequest | CompletionRequest) -> None:
        if asked.min_version is not None:
            raise Refusal(400, "min_version: the run decides which weights answer here; remove it", param="min_version")


def _answer_of(
    generation: Generation, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str], *, has_tools: bool
) -> Answer:
    is_cut = stop_length(generation, tokenizer, stop) is not None
    return answer_of(generation, tokenizer, prompt_ids=prompt_ids, stop=stop, has_tools=has_tools, is_cut=is_cut)


def _done(replies: list[Reply]) -> "asyncio.Future[list[Reply]]":
    """A call that was answered by another process."""
    found: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
    found.set_result(replies)
    return found


def ended(rollout_id: str) -> Refusal:
    """The refusal of what comes after the end."""
    return Refusal(409, f"rollout {rollout_id} has ended", code="rollout_ended")


def _fingerprint(text: str, calls: Any) -> bytes:
    """Of a message with tool calls, as a client gives it back."""
    return hashlib.sha256(orjson.dumps([text or "", calls], option=orjson.OPT_SORT_KEYS)).digest()


def _refused_template(error: Exception) -> Refusal:
    if isinstance(error, Refusal):
        return error
    line = " ".join(str(error).split())[:300]
    return Refusal(400, f"messages: the chat template refuses them: {line}", param="messages")
