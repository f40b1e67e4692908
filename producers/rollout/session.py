"""The session of an environment: chat with the model, call tools, give rewards. Every call becomes an event."""

import asyncio
import copy
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.attempts import Cause
from rollstream.producers.engines.base import (
    Engine,
    Generation,
    GenerationRequest,
    NoTokenizer,
    Tokenizer,
    check_generation,
)
from rollstream.producers.league.draw import UNTRAINED, opponents_of
from rollstream.producers.league.opponents import as_recorded
from rollstream.producers.rollout import continuing, scored_answers
from rollstream.producers.rollout.conversation import Conversation, Prompt, recorded_call, usage_of
from rollstream.producers.rollout.gateway_interface import REFUSED_CALL, CallOptions, Gateway, metadata_of, rendered
from rollstream.producers.rollout.journal import Journal
from rollstream.producers.rollout.prompts import WrittenAnswers, history_of, prompt_of
from rollstream.producers.rollout.recorded_call import ImportContext, fields_of, read_step
from rollstream.producers.rollout.rendering import renderer_for
from rollstream.producers.rollout.reply import (
    Demonstrator,
    Failure,
    Message,
    Parse,
    Reply,
    TurnsExhausted,
    demonstrated,
    plain,
    plain_messages,
    text_given,
)
from rollstream.producers.rollout.rewards import RewardError, check_target, finite, played
from rollstream.producers.rollout.user_code import refused_with_pause
from rollstream.schemas import ids
from rollstream.schemas.errors import EnvironmentRunError, PromptRefusedError, describe
from rollstream.schemas.events import StepRecorded, TaskRequested
from rollstream.schemas.events.recorded import RecordedStep
from rollstream.schemas.settings import EXTERNAL
from rollstream.schemas.variables import conceal


class Session:
    """One attempt at one rollout, as its environment sees it.

    `inputs` are the example's, the attempt's own copy; `member` is its number in the group; `agents` the names that
    may chat; `max_turns` counts answers an agent; `epoch` is that of the job that asked, `purpose` train or validation.
    `seed` and `rng` are this member's own. `task_seed` and `task_rng` are equal in all members of the group: draw from
    these whatever its members must share (a secret, an opponent).
    """

    task_rng = functools.cached_property(lambda self: random.Random(ids.derive_seed(self.task_seed, "world")))
    rng = functools.cached_property(lambda self: random.Random(ids.derive_seed(self.seed, "member")))

    def __init__(
        self,
        task: TaskRequested,
        *,
        member: int,
        engine: Engine,
        journal: Journal,
        demonstrator: Demonstrator,
        artifacts: ArtifactStore | None = None,
        opponents: Mapping[str, str] | None = None,
        play_scripted: Callable[["Session", Sequence[Message], str, str], Any] | None = None,
        gateway: Gateway | None = None,
        is_continued: bool = False,
    ) -> None:
        """`opponents`: players by agent in place of those that are drawn for the task. `play_scripted`: the answer of
        a scripted one, by session, messages, agent and the player's name. `gateway`: where programs outside play the
        rollout. `is_continued`: the journal has steps of another process.
        """
        self.inputs: dict[str, Any] = copy.deepcopy(task.inputs)
        self.task_seed = task.seed
        self.member = member
        self.seed = ids.member_seed(task.seed, member)
        self.epoch, self.purpose = task.epoch, task.purpose
        self.min_version = task.min_version
        self.max_turns = task.settings.max_turns
        self.agents = tuple(task.settings.agents)
        self.opponents = opponents_of(task) if opponents is None else opponents
        """Players of seats other than the newest weights, by agent. Their steps are recorded and not trained on."""
        self.artifacts = artifacts
        """Store of the artifacts that the task's inputs name."""
        self.failure: Failure | None = None
        """Cause and message of the first failure that is not the environment's to forgive."""
        self._task = task
        self._settings = task.settings
        self._engine = engine
        self._journal, self._demonstrator = journal, demonstrator
        self._play, self.gateway = play_scripted, gateway
        self.rollout_id, self.sampling = journal.rollout_id, task.settings.sampling
        self.has_step, self.step, self.acknowledged = journal.has_step, journal.step, journal.acknowledged
        self.is_over = journal.is_over
        self._conversations: dict[str, Conversation] = {}
        self._written = WrittenAnswers()
        self._num_turns: dict[str, int] = {}
        self._num_calls: dict[str, int] = {}
        self._num_scored: dict[str, int] = {}
        self._num_levels = 0
        """Turns so far, of all agents: levels of the tree whose leaves are the members."""
        self.recorded, self.rewarded = (journal.steps, journal.rewards) if is_continued else ((), ())
        """Steps and rewards of another process that this one continues; `replies`: the answers among the steps."""
        self._last_answers = scored_answers.LastAnswers(played(self.recorded))
        self.messages = self._last_answers.messages
        """Messages of each agent's last answered call, and the answer as its client got it, by agent."""
        self.replies = self._restored()

    async def chat(self, messages: Sequence[Message], agent: str = "agent", tools: Sequence[Any] = ()) -> Reply:
        """The model's answer to `messages`, sampled with the run's settings. `tools`: functions that it may call.

        What the agent's model saw and said in earlier calls stays token for token, as long as the messages begin alike.
        Raises TurnsExhausted, or EnvironmentRunError for an agent that is not configured.
        """
        asked, sent = CallOptions(plain([*tools], "tools")) if tools else None, self._written.restored(messages)
        (reply,) = await self.sample(sent, 1, agent, asked=asked)
        parse = None if asked is None else self.parser(agent, reply.prompt, asked.tools)
        return reply if asked is None else self._written.parsed(reply, parse, sent)

    @refused_with_pause
    async def sample(
        self, messages: Sequence[Message], num: int, agent: str = "agent", *, asked: CallOptions | None = None
    ) -> list[Reply]:
        """`num` answers to the same messages, sampled side by side; together they are one turn.

        A later call goes on from the answer that its messages hold. Raises what `chat` raises. `asked`: what a program
        outside asked for. A prompt that the model cannot take is recorded as refused, and fails no rollout if caught.
        """
        group = self.model_group(agent)
        if group.startswith(ids.SCRIPTED):
            return [await self._play_scripted(messages, agent, group) for _ in self._take_turn(agent, num)]
        sent = plain_messages(messages)
        prompt = self._prompt(self._conversation(agent, group), sent, group, asked)
        self._journal.share_input(sent, prompt.prefix)
        seeds = self._take_turn(agent, num)  # a call that leaves no step takes no seed: it is not in the log either
        step_indices = [self._journal.open_step() for _ in seeds]
        began_ms, prompt = self._journal.clock(), prompt._replace(request=step_indices[0] if num > 1 else None)
        try:
            generations = await self._answers(prompt, sent, agent, seeds, asked)
        except PromptRefusedError as error:
            fields: dict[str, Any] = {"name": REFUSED_CALL, "metadata": metadata_of(asked, {})}
            fields |= {"event_type": "CUSTOM_END", "data": {"input": sent, "output": conceal(str(error))}}
            for step_index in step_indices:
                await self._journal.record_step(step_index, began_ms=began_ms, agent=agent, **fields)
            raise
        return [
            await self._record_answer(step_index, began_ms, agent, group, sent, prompt, generation, asked)
            for step_index, generation in zip(step_indices, generations, strict=True)
        ]

    @refused_with_pause
    async def relabel(self, messages: Sequence[Message], text: str, agent: str = "agent") -> Reply:
        """Record `text` as the answer that the agent should have given to `messages`, beside the actual one; no turn.

        Its tokens have neither a version nor log-probabilities: it is for algorithms that imitate.
        """
        group, sent = self.model_group(agent), plain_messages(messages)
        prompt = self._prompt(self._conversation(agent, group), sent, group)
        step_index, began_ms = self._journal.open_step(), self._journal.clock()
        generation = self._encoded(text, group)
        return await self._record_answer(step_index, began_ms, agent, group, sent, prompt, generation, label=text)

    async def _record_answer(
        self,
        step_index: int,
        began_ms: int,
        agent: str,
        group: str,
        sent: list[Message],
        prompt: Prompt,
        generation: Generation,
        asked: CallOptions | None = None,
        label: str | None = None,
    ) -> Reply:
        if (text := label) is None:  # no later call goes on from a label, and nobody scores it
            conversation, stop = self._conversations[agent], () if asked is None else asked.stop
            text = conversation.append_sampled(step_index, prompt, generation.token_ids, stop)
        flags = ({} if label is None else {scored_answers.LABEL: True}) | (UNTRAINED if agent in self.opponents else {})
        step = await self._journal.record_step(
            step_index,
            began_ms=began_ms,
            agent=agent,
            event_type="LLM_END",
            name=group,
            metadata=metadata_of(asked, flags),
            data={"input": sent, "output": text} | ({} if asked is None else asked.data),
            usage_info=usage_of(prompt, generation),
            llm=recorded_call(prompt, generation),
        )
        self._last_answers.add(step)
        return Reply(text, step_index, generation.finish_reason, prompt.token_ids, generation, began_ms)

    async def score(
        self, replies: Sequence[Reply], scores: Sequence[float], *, selected: int, agent: str = "agent"
    ) -> None:
        """Say how good answers to the same messages are beside each other, and which of them (by place) is played.

        A score is not part of the rollout's reward: it makes preference pairs. Raises RewardError for one that is not a
        finite number, EnvironmentRunError if `selected` is the index of no answer.
        """
        turn_index, selected = self._num_scored.get(agent, 0), scored_answers.index_of(selected, len(replies))
        self._num_scored[agent] = turn_index + 1
        turn = scored_answers.turn_id(self._journal.rollout_id, agent, turn_index)
        for index, (reply, score) in enumerate(zip(replies, scores, strict=True)):
            await self.reward(score, scored_answers.SCORE, reply.step_index, agent, is_score=True)
            fields = scored_answers.candidate_fields(
                self._journal.step(reply.step_index),
                turn=turn,
                turn_index=turn_index,
                index=index,
                score=float(score),
                is_selected=index == selected,
            )
            step_index, now_ms = self._journal.open_step(), self._journal.clock()
            step = await self._journal.record_step(step_index, began_ms=now_ms, agent=agent, **fields)
            self._last_answers.add(step)

    @refused_with_pause
    async def tool(self, name: str, input: Any, output: Any, agent: str = "agent") -> int:
        """Record a tool call and its result (JSON values). Returns the step's index."""
        self.model_group(agent)
        if not isinstance(name, str):
            raise EnvironmentRunError(f"the name of a tool is a {type(name).__name__}; give a text")
        data = {"input": plain(input, f"input of tool {name}"), "output": plain(output, f"output of tool {name}")}
        step_index, now_ms = self._journal.open_step(), self._journal.clock()
        fields: dict[str, Any] = {"event_type": "TOOL_END", "name": name, "data": data}
        await self._journal.record_step(step_index, began_ms=now_ms, agent=agent, **fields)
        return step_index

    @refused_with_pause
    async def record(self, step: RecordedStep, *, retokenise: bool = False, assumed_version: int | None = None) -> int:
        """Record a step that happened elsewhere as it was, an LLM call with its tokens. Returns the step's index.

        `retokenise`: make tokens from text where there are none. `assumed_version`: of tokens recorded without one;
        none: the version that the task was asked for at. An agent without a name is the first of the run's.
        """
        step = type(step).model_validate(dict(step))  # a copy, and checked: `model_copy` takes any value
        group = self.model_group(agent := step.agent or next(iter(self.agents), "agent"))
        version = self._task.wanted_version(group) if assumed_version is None else assumed_version
        playing = ImportContext(group, self._settings.policy, version, retokenise)
        conversation = self._conversation(agent, playing.model_group)
        step_index, began_ms = self._journal.open_step(), self._journal.clock()
        reading = read_step(step, step_index, playing, conversation, self._tokenizer(playing.model_group))
        fields = fields_of(step, reading)
        recorded = await self._journal.record_step(step_index, began_ms=began_ms, agent=agent, **fields)
        self._last_answers.add_recorded(recorded, step.chat)
        return step_index

    @refused_with_pause
    async def reward(
        self,
        value: float,
        name: str = "reward",
        step_index: int | None = None,
        agent: str | None = None,
        *,
        is_score: bool = False,
    ) -> None:
        """Give a reward to the whole rollout or to one step, to one agent or to all. Raises RewardError.

        `is_score`: it only compares the step with other answers to the same prompt, and is not part of a sum.
        """
        try:
            number = finite(name, value)
            has_step = step_index is None or self._journal.has_step(step_index)
            check_target(name, step_index, agent, self.agents, is_score=is_score, has_step=has_step)
        except RewardError as error:
            self.failure = self.failure or Failure(Cause.REWARD_ERROR, str(error), error)
            raise
        await self._journal.record_reward(
            name=name, value=number, step_index=step_index, agent=agent, is_score=is_score
        )

    def count_tokens(self, messages: Sequence[Message], agent: str, asked: CallOptions) -> int:
        """Number of tokens in the prompt of these messages. Nothing is recorded."""
        group = self.model_group(agent)
        conversation = self._conversations.get(agent) or Conversation(self._tokenizer(group))
        return len(self._prompt(conversation, [*messages], group, asked).token_ids)

    def _take_turn(self, agent: str, num_answers: int) -> list[int]:
        """A seed for each answer."""
        num_turns, first = self._num_turns.get(agent, 0), self._num_calls.get(agent, 0)
        if num_answers < 1:
            raise EnvironmentRunError(f"{num_answers} answers requested from agent {agent}; request at least 1")
        if num_turns >= self.max_turns:
            raise TurnsExhausted(f"agent {agent} has used its {self.max_turns} turns; raise max_turns")
        self._num_turns[agent] = num_turns + 1
        self._num_calls[agent] = first + num_answers
        level, self._num_levels = self._num_levels, self._num_levels + 1
        branching = self._settings.responses_per_step
        shared_by = branching ** max(0, ids.tree_depth(self._task.num_rollouts, branching) - 1 - level)
        seed = functools.partial(ids.answer_seed, self.task_seed, self.member, agent, level=level, shared_by=shared_by)
        return [*map(seed, range(first, first + num_answers))]

    def model_group(self, agent: str) -> str:
        """Model group that answers for an agent. Raises EnvironmentRunError for an agent that is not configured."""
        if agent not in self._settings.agents:
            known = ", ".join(self.agents) or "none"
            raise EnvironmentRunError(f"agent {agent!r} is not an agent of the run; known agents: {known}")
        return self.opponents.get(agent, self._settings.agents[agent])

    def _conversation(self, agent: str, group: str) -> Conversation:
        if agent not in self._conversations:
            try:
                self._conversations[agent] = Conversation(self._tokenizer(group))
            except Exception as error:
                self._engine_failed(error)
                raise
        return self._conversations[agent]

    def _restored(self) -> dict[int, Reply]:
        def prompt(step: StepRecorded) -> tuple[str, str]:
            data: Any = step.data or {}
            asked, tokenizer = CallOptions.of(step), self._tokenizer(self.model_group(step.agent))
            return rendered(data["input"], tokenizer, asked), history_of(data["input"], asked)

        for agent, (num_turns, num_calls) in continuing.turns(self.recorded).items():
            self._num_turns[agent], self._num_calls[agent] = num_turns, num_calls
            self._num_levels += num_turns
        return continuing.answers(
            self.recorded, lambda agent: self._conversation(agent, self.model_group(agent)), prompt
        )

    def _tokenizer(self, group: str) -> Tokenizer:
        return NoTokenizer() if self._settings.policy == EXTERNAL else self._engine.tokenizer(group)

    def parser(self, agent: str, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Parse | None:
        """A renderer's, None without one. Raises EnvironmentRunError if the run's `renderer` cannot be used."""
        renderer = renderer_for(self._tokenizer(self.model_group(agent)), self._settings.renderer)
        return None if renderer is None else functools.partial(renderer.parse, prompt_ids=prompt_ids, tools=tools)

    def _prompt(
        self, conversation: Conversation, messages: list[Message], group: str, asked: CallOptions | None = None
    ) -> Prompt:
        return prompt_of(conversation, messages, self._tokenizer(group), asked, self._settings.renderer)

    async def _answers(
        self, prompt: Prompt, messages: list[Message], agent: str, seeds: Sequence[int], asked: CallOptions | None
    ) -> list[Generation]:
        begin = functools.partial(self._answer, prompt, messages, agent, asked)
        if len(seeds) == 1 or self._settings.policy == "demonstration":
            return [await begin(seed, index) for index, seed in enumerate(seeds)]
        calls = [asyncio.create_task(begin(seed, index)) for index, seed in enumerate(seeds)]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()

    async def _answer(
        self, prompt: Prompt, messages: list[Message], agent: str, asked: CallOptions | None, seed: int, index: int
    ) -> Generation:
        group, on_ids = self.model_group(agent), None if asked is None else asked.on_answer_tokens(index)
        if self._settings.policy == "demonstration":
            return await self._demonstration(messages, agent, group)
        sampling = self._settings.sampling if asked is None else asked.within(self._settings.sampling)
        request = GenerationRequest(group, prompt.token_ids.tolist(), sampling, seed, self._journal.rollout_id, on_ids)
        try:
            generation = as_recorded(await self._engine.generate(request), group)
            check_generation(generation)
        except Exception as error:
            if not isinstance(error, PromptRefusedError):
                self._engine_failed(error)
            raise
        return generation if asked is None else asked.cut(generation, self._tokenizer(group))

    async def _play_scripted(self, messages: Sequence[Message], agent: str, player: str) -> Reply:
        """The answer of a scripted opponent, which is not an LLM: a step without tokens."""
        sent = plain_messages(messages, for_model=False)
        step_index, began_ms = self._journal.open_step(), self._journal.clock()
        assert self._play is not None, "nobody plays scripted opponents"
        text = await text_given("play_scripted()", self._play(self, sent, agent, player.removeprefix(ids.SCRIPTED)))
        fields: dict[str, Any] = {"name": player, "metadata": dict(UNTRAINED), "data": {"input": sent, "output": text}}
        fields |= {"event_type": "LLM_END", "agent": agent}
        self._last_answers.add(await self._journal.record_step(step_index, began_ms=began_ms, **fields))
        return Reply(text, step_index, "stop")

    async def _demonstration(self, messages: list[Message], agent: str, group: str) -> Generation:
        try:
            text = await demonstrated(self._demonstrator, self, messages, agent)
        except Exception as error:
            self.failure = self.failure or Failure(Cause.ENVIRONMENT_ERROR, f"demonstrator: {describe(error)}", error)
            raise
        return self._encoded(text, group)

    def _encoded(self, text: str, group: str) -> Generation:
        tokenizer = self._engine.tokenizer(group)
        token_ids, end = tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id
        return Generation((*token_ids, *([] if token_ids[-1:] == [end] else [end])), (), (), "stop")

    def _engine_failed(self, error: Exception) -> None:
        self.failure = self.failure or Failure(Cause.ENGINE_ERROR, describe(error), error)
