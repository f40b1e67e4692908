"""Prompts of messages: bridged by the renderer of the model's family where there is one, else by their text. Pure.

Answers with tool calls that come back in parts are taken as the model wrote them.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from rollstream.producers.engines.base import Tokenizer
from rollstream.producers.rollout import call_arguments
from rollstream.producers.rollout.conversation import Conversation, Prompt, history_with
from rollstream.producers.rollout.gateway_interface import CallOptions, rendered
from rollstream.producers.rollout.rendering import renderer_for
from rollstream.producers.rollout.reply import Message, Parse, Reply, is_list, parts_of, plain
from rollstream.schemas.errors import EnvironmentRunError

_MAPPING = (dict, Mapping)
"""Most messages are dictionaries, which need no look at an abstract class."""


def prompt_of(
    conversation: Conversation,
    messages: list[dict[str, Any]],
    tokenizer: Tokenizer,
    options: CallOptions | None,
    wanted: str,
) -> Prompt:
    """Ids to go on from. `wanted`: the run's `renderer`. Raises EnvironmentRunError for a prompt without tokens and, if
    there are tools, for a renderer that cannot be used, and the errors of `rendered`.
    """
    text = rendered(messages, tokenizer, options)
    bridged = options and _bridged(conversation, text, messages, tokenizer, options, wanted)
    prompt = bridged or conversation.prompt(
        text, options and options.token_ids, is_plain=options is not None and options.text is not None
    )
    if not prompt.token_ids:
        raise EnvironmentRunError("the chat template produces no tokens for these messages; add content")
    history = options and history_of(messages, options)
    return prompt._replace(history=history) if history else prompt


def history_of(messages: Sequence[Mapping[str, Any]], asked: CallOptions) -> str:
    """Digest of messages and tools; empty without tools: then the text is enough."""
    if not asked.tools or asked.text is not None:
        return ""
    body = orjson.dumps([list(asked.tools), list(messages)], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(body).hexdigest()


def _bridged(
    conversation: Conversation,
    text: str,
    messages: list[dict[str, Any]],
    tokenizer: Tokenizer,
    asked: CallOptions,
    wanted: str,
) -> Prompt | None:
    """The last answer in the messages must be one of the conversation's own, and come after what it was given to."""
    if not asked.tools or asked.text is not None:
        return None
    renderer = renderer_for(tokenizer, wanted)  # also without an answer: one that cannot be used is known before a turn
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return None
    answered, after = messages[answers[-1]], messages[answers[-1] + 1 :]
    if renderer is None or not after or answered.keys() != {"role", "content"}:
        return None
    before = history_with(history_of(messages[: answers[-1]], asked), answered["content"])
    bridge = functools.partial(renderer.bridge, messages=after, tools=asked.tools)
    return conversation.bridged(text, before, bridge)


class WrittenAnswers:
    """Texts that a rollout's model wrote, by the messages that clients make of them."""

    def __init__(self) -> None:
        self._texts: dict[bytes, dict[bytes, str]] = {}
        """Texts by fingerprint of the message, then by digest of the messages that it answers, the newest last; at most
        two a call.
        """

    def keep(self, text: str, content: str, calls: Sequence[Mapping[str, Any]], sent: Sequence[Message]) -> None:
        """`text`: as it was sampled for the messages `sent`; `content`: without the calls. A client may give back
        either with the calls.
        """
        answered = hashlib.sha256()
        for message in sent:
            answered.update(_line(message))
        for found in {_fingerprint(content, calls), *([_fingerprint(text, calls)] if calls else [])}:
            texts = self._texts.setdefault(found, {})
            texts.pop(answered.digest(), None)
            texts[answered.digest()] = text

    def parsed(self, reply: Reply, parse: Parse | None, sent: Sequence[Message]) -> Reply:
        """The answer to a request with tools, split into its parts; it may come back so."""
        if reply.generation is None:  # a scripted opponent's
            return reply
        parts = parts_of(reply.text, reply.generation.token_ids, reply.step_index, parse)
        self.keep(reply.text, parts.content, parts.tool_calls, sent)
        return replace(reply, parts=parts)

    def as_written(self, messages: list[Message]) -> list[Message]:
        """Messages, the model's answers among them as it wrote them.

        Of answers that a client cannot tell apart, it is the one to the same messages, else the newest. Without calls
        it has to be one to the same messages: a client may write such a text itself.
        """
        if not self._texts:
            return messages
        found: list[Message] = []
        before = hashlib.sha256()
        for message in messages:
            found.append(self._written(message, before.digest()) or message)
            before.update(_line(found[-1]))
        return found

    def _written(self, message: Message, before: bytes) -> Message | None:
        if not _is_answer(message):
            return None
        texts = self._texts.get(_fingerprint(message.get("content"), message.get("tool_calls")))
        if texts is None:
            return None
        written = texts.get(before)
        if written is None and not message.get("tool_calls"):
            return None
        return {"role": "assistant", "content": next(reversed(texts.values())) if written is None else written}

    def restored(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages as the chat template gets them. Raises EnvironmentRunError for one that is not JSON."""
        if not is_list(messages):
            return messages  # for others to refuse
        messages = [*messages]
        if not self._texts and not any(map(_has_calls, messages)):
            return messages
        return self.as_written([for_template(message) for message in plain(messages, "messages")])


def for_template(message: Message) -> Message:
    """A message as chat templates expect it: text as its content, arguments of tool calls as objects."""
    if not _has_calls(message):
        return message
    calls = message["tool_calls"]
    return message | {
        "content": message.get("content") or "",
        "tool_calls": [call_arguments.with_object_arguments(call) for call in calls],
    }


def _is_answer(message: Any) -> bool:
    """Whether a message has the shape of the assistant's; any other is up to the chat template."""
    if not isinstance(message, _MAPPING) or message.get("role") != "assistant":
        return False
    content, calls = message.get("content"), message.get("tool_calls") or []
    are_calls = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    return are_calls and isinstance(content, str | None)


def _has_calls(message: Any) -> bool:
    return isinstance(message, _MAPPING) and bool(message.get("tool_calls")) and _is_answer(message)


def _line(message: Message) -> bytes:
    return f"{call_arguments.dumps(message, sort_keys=True)}\n".encode()


def _fingerprint(text: str | None, calls: Sequence[Mapping[str, Any]] | None) -> bytes:
    """Fingerprint of a message as a client returns it: arguments count by their values, whatever their spacing, order
    and way of writing numbers. What clients add to a call (openai-python: `parsed_arguments`) does not count.
    """
    called: list[Any] = []
    for call in calls or ():
        function: Any = call_arguments.with_exact_arguments(dict(call)).get("function")
        if isinstance(function, dict):
            function = [function.get("name"), call_arguments.as_javascript(function.get("arguments"))]
        called.append([call.get("id"), function])
    return hashlib.sha256(call_arguments.dumps([(text or "").strip(), called], sort_keys=True).encode()).digest()
