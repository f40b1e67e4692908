"""Prompts of messages: bridged by the renderer of the model's family where there is one, else by their text. Pure."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from rollstream.producers.engines.base import Tokenizer
from rollstream.producers.rollout.conversation import Conversation, Prompt, history_with
from rollstream.producers.rollout.gateway_interface import CallOptions, rendered
from rollstream.producers.rollout.rendering import renderer_for
from rollstream.schemas.errors import EnvironmentRunError


def prompt_of(
    conversation: Conversation,
    messages: list[dict[str, Any]],
    tokenizer: Tokenizer,
    options: CallOptions | None,
    wanted: str,
) -> Prompt:
    """Ids to go on from. `wanted`: the run's `renderer`. Raises EnvironmentRunError for a prompt without tokens,
    and what `rendered` raises.
    """
    asked, text = options or CallOptions(), rendered(messages, tokenizer, options)
    prompt = _bridged(conversation, text, messages, tokenizer, asked, wanted)
    prompt = prompt or conversation.prompt(text, asked.token_ids)
    if not prompt.token_ids:
        raise EnvironmentRunError("the chat template produces no tokens for these messages; add content")
    return replace(prompt, history=history_of(messages, asked))


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
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or not asked.tools or asked.text is not None:
        return None
    answered, after = messages[answers[-1]], messages[answers[-1] + 1 :]
    renderer = renderer_for(tokenizer, wanted)
    if renderer is None or not after or answered.keys() != {"role", "content"}:
        return None
    before = history_with(history_of(messages[: answers[-1]], asked), answered["content"])
    bridge = functools.partial(renderer.bridge, messages=after, tools=asked.tools)
    return conversation.bridged(text, before, bridge)
