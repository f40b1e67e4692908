"""The gateway as seen by sessions and environments: programs outside this process play rollouts through it."""

import contextlib
import functools
import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rollstream.producers.engines.base import Generation, Tokenizer
from rollstream.producers.rollout import call_arguments
from rollstream.schemas.errors import ChatTemplateError
from rollstream.schemas.events.rollouts import StepRecorded, VersionSpan
from rollstream.schemas.settings import Sampling
from rollstream.schemas.variables import one_line

REFUSED_CALL = "refused_call"
"""Name of the step of a call that was refused; it has no tokens."""
END = "gateway.end"
"""Name of the step with which an agent outside has ended its rollout."""


def _whole(generation: Generation, tokenizer: Tokenizer) -> Generation:
    return generation


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of a program outside, sent with its messages. Anything that it cannot choose is not in here."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools for the chat template."""
    max_new_tokens: int | None = None
    """Fewer than the run's setting, or all of them."""
    cut: Callable[[Generation, Tokenizer], Generation] = _whole
    """The part of an answer that is given and recorded: up to a stop text."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Recorded in the step's metadata under `gateway`: JSON values."""
    text: str | None = None
    """The prompt as it is, in place of rendered messages."""
    token_ids: "array[int] | None" = None
    """The same as ids, which are taken as they are; `text` is their text."""
    on_tokens: Callable[[int, Sequence[int]], None] | None = None
    """Called with the index of each answer and its ids, while they are sampled."""

    @property
    def data(self) -> dict[str, Any]:
        """Data for the chat template and the record beside the messages."""
        return {"tools": list(self.tools)} if self.tools else {}

    @classmethod
    def of(cls, step: StepRecorded) -> "CallOptions":
        """Options with which a recorded call was rendered."""
        data: Any = step.data or {}
        metadata: Any = (step.metadata or {}).get("gateway", {})
        text = data["input"][0]["content"] if metadata.get("is_text") else None
        return cls(tools=tuple(data.get("tools", ())), text=text, metadata=metadata)

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop texts: the program is given an answer without the first of them and all after it."""
        return tuple(self.metadata.get("stop", ()))

    def on_answer_tokens(self, index: int) -> Callable[[Sequence[int]], None] | None:
        """Callback for the engine's tokens of one answer."""
        return None if self.on_tokens is None else functools.partial(self.on_tokens, index)

    def within(self, sampling: Sampling) -> Sampling:
        """The run's sampling, with fewer tokens if fewer were asked for."""
        if self.max_new_tokens is None or self.max_new_tokens >= sampling.max_new_tokens:
            return sampling
        return sampling.model_copy(update={"max_new_tokens": self.max_new_tokens})


class OpenedRollout(Protocol):
    """A rollout that a program outside can play."""

    @property
    def base_url(self) -> str:
        """Without `/v1`: what OpenAI's clients take has it appended, what Anthropic's take has not."""
        ...

    @property
    def key(self) -> str:
        """The capability to play this rollout and no other."""
        ...

    async def ended(self) -> None:
        """Return when the program has ended the rollout, and every call is recorded.

        Raises EnvironmentRunError if the program reported a failure, TurnsExhausted if it asked for too many answers.
        """
        ...

    async def finish(self) -> None:
        """The program is gone: return when every call is recorded. Raises as `ended` does."""
        ...


class Gateway(Protocol):
    """Interface that opens rollouts to programs outside."""

    def open(self, session: Any, agent: str, *, is_claimable: bool) -> AbstractAsyncContextManager[OpenedRollout]:
        """Answer calls for the rollout of a Session while inside; calls whose model names no other agent are `agent`'s.

        `is_claimable`: a claim of any rollout may get this one.
        """
        ...


def rendered(messages: list[dict[str, Any]], tokenizer: Tokenizer, asked: CallOptions | None) -> str:
    """The prompt of messages. Raises ChatTemplateError for those of a program outside that the template refuses."""
    if asked is None:
        exact = call_arguments.for_template(messages)
        return tokenizer.apply_chat_template(exact, tokenize=False, add_generation_prompt=True)
    if asked.text is not None:
        return asked.text
    return by_template(messages, tokenizer, **asked.data)


def by_template(messages: list[dict[str, Any]], tokenizer: Tokenizer, **options: Any) -> str:
    """The prompt of a program's messages, as the chat template writes it.

    Agents send several system messages, also between turns. Where the template refuses that, the first ones are one
    message, and later ones are the user's. Raises ChatTemplateError.
    """
    messages = call_arguments.for_template(messages)
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True, **options)
    try:
        return render(messages)
    except Exception as error:  # a template is a program by the model's maker and may raise anything
        other = _with_one_system(messages)
        if other != messages:
            with contextlib.suppress(Exception):  # the first refusal is raised: it is about the messages as sent
                return render(other)
        raise ChatTemplateError(f"messages: the chat template refuses them: {one_line(error)}; correct them") from error


def _with_one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    first = [*itertools.takewhile(lambda message: message["role"] == "system", messages)]
    merged = [{**first[0], "content": "\n\n".join(str(one["content"]) for one in first)}] if first else []
    rest = messages[len(first) :]
    return [*merged, *({**one, "role": "user"} if one["role"] == "system" else one for one in rest)]


def metadata_of(asked: CallOptions | None, flags: Mapping[str, Any]) -> dict[str, Any] | None:
    """Metadata of a step: its flags, and what the gateway recorded with it."""
    return {**flags, **({"gateway": dict(asked.metadata)} if asked is not None and asked.metadata else {})} or None


def cut_to(generation: Generation, num_tokens: int) -> Generation:
    """The first tokens of an answer, which then ended there by itself."""
    spans: list[VersionSpan] = []
    left = num_tokens
    for span in generation.spans:
        if left > 0:
            spans.append(span.model_copy(update={"length": min(left, span.length)}))
            left -= span.length
    kept = generation.kept
    return replace(
        generation,
        token_ids=generation.token_ids[:num_tokens],
        logprobs=generation.logprobs[:num_tokens],
        spans=tuple(spans),
        finish_reason="stop",
        kept=None if kept is None else kept.first(num_tokens),
    )
