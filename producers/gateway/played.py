"""One rollout that a program outside plays: its calls become steps of its session, each of them once.

A repeated call (the same `Idempotency-Key`, or the retry count of OpenAI's and Anthropic's clients) gets the recorded
answer, or waits for the one that is on its way. A client that hangs up changes nothing: its call is recorded, and
answered when it is asked for again.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rollstream.producers.engines.base import Engine
from rollstream.producers.gateway.call_keys import ENDED, MAX_ERROR_CHARS, CallIdentity, RememberedCalls
from rollstream.producers.gateway.rollout_model import EXHAUSTED, RolloutModel, SampledAnswers
from rollstream.producers.openai.completions import CompletionRequest
from rollstream.producers.openai.requests import ENGINE_ERROR, ChatRequest, Refusal
from rollstream.producers.openai.stream_words import Answered
from rollstream.producers.openai.streaming import OnText
from rollstream.producers.rollout.environment import task_of
from rollstream.producers.rollout.gateway_interface import END
from rollstream.producers.rollout.reply import Failure, Reply, TurnsExhausted
from rollstream.producers.rollout.session import Session
from rollstream.schemas.errors import EnvironmentRunError, ModelError, RollstreamError, retrieve_exception
from rollstream.schemas.events.recorded import RecordedStep
from rollstream.schemas.services import GatewaySection
from rollstream.schemas.variables import recordable

MAX_REWARDS = 10_000
"""Maximum rewards of one rollout: each is an event, and is kept for clients that give it again."""
CLAIM = "gateway.claim"
"""Name of the step with which the rollout was claimed."""
ENGINE_FAILED = "gateway.engine_error"
"""Name of the step of the first error of the engine, by which the rollout has failed."""
Result = TypeVar("Result")


class PlayedRollout:
    """Implementation of `rollout.gateway_interface.OpenedRollout`, with the effects of its calls, rewards and end."""

    def __init__(
        self,
        session: Session,
        engine: Engine,
        agent: str,
        *,
        base_url: str,
        key: str,
        settings: GatewaySection,
        conceal: Callable[[str], str],
    ) -> None:
        """`conceal`: takes secrets out of what the agent reports."""
        self.session = session
        self._conceal = conceal
        self._max_calls = settings.max_concurrent_calls
        self.base_url = base_url
        self.key = key
        self.model = RolloutModel(session, engine, agent, settings.model_aliases)
        self._agent = agent
        self._calls = RememberedCalls()
        self._ending: asyncio.Task[None] | None = None
        self._working: set[asyncio.Task[Any]] = set()
        self._rewards: dict[tuple[str, int | None, str | None], float] = {}
        self._end: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.claim_key = ""
        """Digest of the key under which the rollout was claimed."""
        self.is_given = False
        """Whether this process answers a claim with it."""
        self.is_claimed = False
        self._is_failure_recorded = False
        self._restore()

    async def call(
        self, asked: ChatRequest | CompletionRequest, identity: CallIdentity, on_text: OnText | None = None
    ) -> Answered:
        """The answers to a call, once the log has acknowledged them. Raises Refusal.

        `on_text` is told what is sampled now; a recorded answer comes whole.
        """
        task: asyncio.Future[SampledAnswers] | None = self._calls.repeated(identity)
        if task is None:
            self._check_open()
            self._check_engine()
            self._check_sampled(asked)
            self._check_capacity()
            agent = self.model.agent_of(asked.model)
            task = self._begin(lambda: self._sample(asked, identity, agent, on_text))
            self._calls.add(identity, task)
        sampled = await self._result(task)
        self._calls.mark_answered(identity.body_sha256, task)
        answered, sampled.answered = sampled.answered, None
        return answered or self.model.answered(asked, sampled.replies)

    async def _sample(
        self, asked: ChatRequest | CompletionRequest, identity: CallIdentity, agent: str, on_text: OnText | None
    ) -> SampledAnswers:
        """Sample answers, and record the first error of the engine: the rollout has failed by it, in another process
        too.
        """
        try:
            return await self.model.sample(asked, identity, agent, on_text)
        except Exception:
            reason = self._engine_error()
            with contextlib.suppress(EnvironmentRunError):  # the rollout ended meanwhile
                if reason is not None and not self._is_failure_recorded:
                    self._is_failure_recorded = True
                    await self._record(ENGINE_FAILED, {"error": recordable(reason, MAX_ERROR_CHARS)})
            if reason is not None:
                await self.session.acknowledged()
            raise

    def too_many(self, identity: CallIdentity) -> None:
        """A call was refused because of a limit (429)."""
        self._calls.refuse(identity)

    async def reward(self, value: float, name: str, step_index: int | None, agent: str | None) -> None:
        """Give a reward; the same again changes nothing. Raises Refusal."""
        key = name, step_index, agent
        given = self._rewards.get(key)
        if given is not None and given != value:
            message = f"reward {name} was given as {given:g}; it cannot become {value:g}"
            raise Refusal(409, message, param="value", is_final=True)
        if given is not None:
            return await self.session.acknowledged()
        self._check_open()
        session = self.session
        if agent is not None and agent not in session.agents:
            raise Refusal(400, f"agent: {agent!r} is unknown; known agents: {', '.join(session.agents)}", param="agent")
        if step_index is not None and not self._is_call(step_index):
            message = f"step_index: step {step_index} is not a model call of this rollout; give the `step_index` that"
            raise Refusal(400, f"{message} the response to the call has beside `version`", param="step_index")
        if len(self._rewards) >= MAX_REWARDS:
            raise Refusal(400, f"rollout {session.rollout_id} has {MAX_REWARDS} rewards already; give fewer")
        self._rewards[key] = value
        await self._result(self._begin(lambda: self._give(value, name, step_index, agent)))

    async def end(self, error: str | None = None) -> None:
        """The program is done; `error`: it failed. Once ended, it stays as it was. The log has acknowledged it then."""
        if self._end.done():
            return
        if self._ending is None:
            concealed = None if error is None else recordable(self._conceal(error), MAX_ERROR_CHARS)
            self._ending = self._begin(lambda: self._record_end(concealed))
        await self._result(self._ending)

    async def claim(self, key: str) -> None:
        """Somebody plays the rollout from now on. The log has acknowledged it then. Raises Refusal (409) if it ends
        meanwhile.
        """
        if self.is_claimed:
            return await self.session.acknowledged()
        self.is_claimed = True
        self.claim_key = key
        try:
            await self._result(self._begin(lambda: self._record(CLAIM, {"key_sha256": key})))
        except Refusal as refused:
            if refused.code != ENDED:
                raise
            message = f"rollout {self.session.rollout_id} has ended by its timeout while it was claimed; claim again"
            raise Refusal(refused.status, message, code=ENDED) from refused

    @property
    def is_held(self) -> bool:
        """Whether its claim has surely been answered: by this process, or it has been played since."""
        is_played = self._calls or self._working or self._rewards or self._end.done()
        return bool(self.is_given or is_played) or any(step.name != CLAIM for step in self.session.recorded)

    async def _record_end(self, error: str | None) -> None:
        await self._record(END, {"error": error})
        self._set_ended(error)

    async def _record(self, name: str, data: dict[str, Any]) -> None:
        step = RecordedStep(event_type="CUSTOM_END", name=name, data=data, agent=self._agent)
        await self.session.record(step)
        await self.session.acknowledged()

    def _set_ended(self, error: str | None) -> None:
        if not self._end.done():
            self._end.set_result(error)

    def _restore(self) -> None:
        """Take up what another process has recorded of this rollout."""
        calls: dict[tuple[str, str, float | None], list[Reply]] = {}
        for step in self.session.recorded:
            data: Any = step.data or {}
            metadata: Any = (step.metadata or {}).get("gateway")
            if step.name == CLAIM:
                self.is_claimed, self.claim_key = True, data["key_sha256"]
            elif step.name == END:
                self._set_ended(data["error"])
            elif step.name == EXHAUSTED:
                self.model.exhausted = TurnsExhausted(data["error"])
            elif step.name == ENGINE_FAILED:
                reason, self._is_failure_recorded = data["error"], True
                self.session.failure = Failure(ENGINE_ERROR, reason, ModelError(reason))
            elif metadata and step.step_index in self.session.replies:
                reply = self.session.replies[step.step_index]
                # Answers of one call began together; of an equal one, some may be lost.
                one = metadata["body_sha256"], metadata.get("key_sha256", ""), step.span_event_timestamp
                found = calls.setdefault(one, [])
                found[:] = [*found, reply] if len(found) < metadata["n"] else [reply]
                text = self.model.keep_text(reply, step, metadata)
                if len(found) == metadata["n"]:
                    identity = CallIdentity(metadata["body_sha256"], metadata.get("key_sha256"))
                    self._calls.add(identity, _done([*found]))
                    self.model.keep_response(found[0].step_index, metadata, text)
        self._rewards = {(one.name, one.step_index, one.agent): one.value for one in self.session.rewarded}

    async def ended(self) -> None:
        """See `OpenedRollout`."""
        await asyncio.shield(self._end)
        await self.finish()

    async def finish(self) -> None:
        """See `OpenedRollout`."""
        if self._ending is not None:
            await asyncio.wait({self._ending})
        self._set_ended(None)
        while self._working:
            await asyncio.wait(set(self._working))
        error = self._end.result()
        if error is not None:
            raise EnvironmentRunError(f"the agent reported: {error}")
        if self.model.exhausted is not None:
            raise self.model.exhausted

    def close(self) -> None:
        """Stop what is under way."""
        self._set_ended(None)
        for task in self._working:
            task.cancel()

    def description(self) -> dict[str, Any]:
        """Answer to the program that claims the rollout: its task, the address at which it is played, and its key."""
        return task_of(self.session) | {"base_url": self.base_url, "key": self.key}

    async def _result(self, task: "asyncio.Future[Result]") -> Result:
        """Result of work that goes on even if the client hangs up. Raises Refusal too if the rollout ends before it is
        done.
        """
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise self._interrupted() from None

    def _interrupted(self) -> Refusal:
        rollout_id = self.session.rollout_id
        if self.session.is_over():
            return ended(rollout_id)
        message = f"rollout {rollout_id} is being handed over to another process; try again in 1 s"
        return Refusal(503, message, code="rollout_not_found", retry_after_s=1)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work())
        self._working.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._working.discard(task)
        retrieve_exception(task)  # the client may have hung up

    def _is_call(self, step_index: int) -> bool:
        return self.session.has_step(step_index) and self.session.step(step_index).event_type == "LLM_END"

    async def _give(self, value: float, name: str, step_index: int | None, agent: str | None) -> None:
        await self.session.reward(value, name, step_index, agent)
        await self.session.acknowledged()

    def _check_open(self) -> None:
        if self._end.done() or self._ending is not None:
            raise ended(self.session.rollout_id)

    def _check_engine(self) -> None:
        """The rollout has failed with the first error of its engine: nothing that the agent still does counts."""
        reason = self._engine_error()
        if reason is None:
            return
        message = f"rollout {self.session.rollout_id} has failed by an error of its engine ({reason}); end it"
        raise Refusal(500, message, code=ENGINE_ERROR, is_final=True)

    def _engine_error(self) -> str | None:
        """The error of the engine by which the rollout has failed, as agents are told it."""
        failure = self.session.failure
        if failure is None or failure.cause != ENGINE_ERROR:
            return None
        is_told = isinstance(failure.error, RollstreamError)  # any other may contain secrets
        return self._conceal(str(failure.error)) if is_told else "see the log of the producers"

    def _check_capacity(self) -> None:
        if len(self._working) >= self._max_calls:
            raise Refusal(
                429,
                f"rollout {self.session.rollout_id} has {len(self._working)} calls in progress, as many as "
                "gateway.max_concurrent_calls allows; wait for one of them",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )

    def _check_sampled(self, asked: ChatRequest | CompletionRequest) -> None:
        if asked.min_version is not None:
            raise Refusal(400, "min_version: the run decides which weights answer here; remove it", param="min_version")


def _done(replies: list[Reply]) -> "asyncio.Future[SampledAnswers]":
    """A call that was answered by another process."""
    found: asyncio.Future[SampledAnswers] = asyncio.get_running_loop().create_future()
    found.set_result(SampledAnswers(replies))
    return found


def ended(rollout_id: str) -> Refusal:
    """The error for requests after the end."""
    return Refusal(409, f"rollout {rollout_id} has ended; begin another one", code=ENDED, is_final=True)
