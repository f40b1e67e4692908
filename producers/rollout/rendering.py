"""Renderers of model families, by the optional `renderers` library: answers parsed from their ids, prompts bridged.

A renderer is taken for a tokenizer only if it writes the ids that the tokenizer's own chat template writes, whatever
the model is called: templates change between versions of a model, and folders have any name.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.producers.engines.base import Tokenizer
from rollstream.producers.rollout import call_arguments
from rollstream.schemas.errors import EnvironmentRunError, describe

AUTO, NONE = "auto", "none"
NEEDS_FILES = frozenset({"gpt-oss", "inkling"})
"""Renderers that fetch files of their own when they are made; only used when they are named."""
MAX_KNOWN = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer in the parts that clients know."""

    content: str
    reasoning: str | None
    calls: tuple[tuple[str, str, str | None], ...]
    """Name, arguments as a JSON object, and the model's own id of each tool call; none if one is malformed."""
    settled: str = ""
    """The content without what is only text because a call in it is malformed or not yet complete."""


class Renderer:
    """One family's renderer for one tokenizer. Pure."""

    def __init__(self, name: str, rendering: Any, tokenizer: Tokenizer) -> None:
        """`rendering`: the library's own object."""
        self.name = name
        self._rendering = rendering
        self._tokenizer = tokenizer

    def parse(self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> ParsedAnswer:
        """Content, reasoning and tool calls of an answer. What cannot be parsed stays text."""
        try:
            found = self._rendering.parse_response([*ids], tools=[*tools], prompt_ids=[*prompt_ids])
        except Exception as error:  # noqa: BLE001 -- a parser raises anything on what a model writes
            logger.warning("renderer %s cannot parse an answer, which stays text: %s", self.name, describe(error))
            return ParsedAnswer(self._text(ids), None, ())
        calls = [_call(one) for one in found.tool_calls]
        content, reasoning = found.content or "", found.reasoning_content or None
        if None not in calls:
            return ParsedAnswer(content, reasoning, tuple(call for call in calls if call is not None), content)
        span = found.tool_calls[0].token_span
        if span is None:
            return ParsedAnswer(self._text(ids), None, ())
        return ParsedAnswer(content + self._text(ids[span[0] :]), reasoning, (), content)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int] | None:
        """Ids of the prompt extended by new messages, which begin with prompt and completion; None if that fails."""
        before = [*prompt_ids, *completion_ids]
        try:
            found = self._rendering.bridge_to_next_turn([*prompt_ids], [*completion_ids], [*messages], tools=[*tools])
        except Exception as error:  # noqa: BLE001 -- a renderer raises anything on messages that it does not know
            logger.warning("renderer %s cannot bridge a prompt: %s", self.name, describe(error))
            return None
        if found is None or found.token_ids[: len(before)] != before:
            return None
        return [*found.token_ids]

    def _text(self, ids: Sequence[int]) -> str:
        text_ids = [*ids]
        if text_ids and text_ids[-1] in self._rendering.get_stop_token_ids():
            text_ids.pop()
        return self._tokenizer.decode(text_ids, skip_special_tokens=False) if text_ids else ""


def renderer_for(tokenizer: Tokenizer, wanted: str) -> Renderer | None:
    """The renderer for a tokenizer; None: its chat template and text alone. `wanted`: `auto`, `none` or a name.

    Raises EnvironmentRunError if a named one cannot be used.
    """
    # The library calls the tokenizer itself, which an engine's wrapper cannot be.
    own: Any = getattr(tokenizer, "wrapped", tokenizer)
    if wanted == NONE or (wanted == AUTO and not hasattr(own, "convert_tokens_to_ids")):
        return None
    return _made_for(own, wanted)


def check_name(wanted: str) -> None:
    """Raises EnvironmentRunError for a name that no renderer has, or if the library is not installed."""
    if wanted in (AUTO, NONE):
        return
    _check_installed(wanted)
    from renderers import config_from_name

    try:
        config_from_name(wanted)
    except ValueError as error:
        raise EnvironmentRunError(f"renderer {wanted}: {describe(error)}") from error


@functools.lru_cache(maxsize=8)
def _made_for(tokenizer: Any, wanted: str) -> Renderer | None:
    return _proven(tokenizer) if wanted == AUTO else _named(wanted, tokenizer)


_proven_names: dict[tuple[Any, ...], str | None] = {}
"""Proven renderer names, by identity of the tokenizer: each weight version may load one more that is equal. At most
MAX_KNOWN.
"""


def _call(parsed: Any) -> tuple[str, str, str | None] | None:
    # A tool that the request lacks is the agent's to refuse, whatever the family.
    arguments = {} if parsed.arguments is None else parsed.arguments
    if str(parsed.status) not in ("ok", "unknown_tool") or not parsed.name:
        return None
    try:
        written = arguments.strip() if isinstance(arguments, str) else call_arguments.dumps(arguments)
        arguments = call_arguments.loads(written)
    except (TypeError, ValueError):
        return None
    return (parsed.name, written, parsed.id) if isinstance(arguments, dict) else None


def _is_installed() -> bool:
    return importlib.util.find_spec("renderers") is not None


def _check_installed(name: str) -> None:
    if not _is_installed():
        raise EnvironmentRunError(
            f"renderer {name}: the package renderers is not installed; pip install '.[renderers]' in rollstream's "
            "checkout, or set renderer: none"
        )


def _named(name: str, tokenizer: Tokenizer) -> Renderer:
    _check_installed(name)
    try:
        return Renderer(name, _made(name, tokenizer), tokenizer)
    except Exception as error:  # a renderer raises anything on a tokenizer that lacks its tokens; it is raised again
        raise EnvironmentRunError(
            f"renderer {name} cannot be used with this tokenizer: {describe(error)}; set renderer: auto, none or the "
            "name of the model's own family"
        ) from error


def _made(name: str, tokenizer: Tokenizer) -> Any:
    from renderers import config_from_name, create_renderer

    config: Any = config_from_name(name)
    return create_renderer(tokenizer, config)


def _proven(tokenizer: Any) -> Renderer | None:
    model = getattr(tokenizer, "name_or_path", "")
    key = model, str(getattr(tokenizer, "chat_template", "")), len(tokenizer), tokenizer.eos_token_id
    if key not in _proven_names:
        if len(_proven_names) >= MAX_KNOWN:
            _proven_names.clear()
        _proven_names[key] = _name_for(tokenizer, model or "this model")
    name = _proven_names[key]
    return None if name is None else Renderer(name, _made(name, tokenizer), tokenizer)


def _name_for(tokenizer: Tokenizer, model: str) -> str | None:
    if not _is_installed():
        _log_missing()
        return None
    from renderers.base import MODEL_RENDERER_MAP

    written = _probes_by_template(tokenizer)
    likely = MODEL_RENDERER_MAP.get(model)
    names = [name for name in dict.fromkeys([likely, *MODEL_RENDERER_MAP.values()]) if name and written]
    for name in names:
        if written and name not in NEEDS_FILES and _writes(name, tokenizer, written):
            logger.info("renderer=%s writes what the chat template of %s writes: it is used", name, model)
            return name
    logger.info("no renderer writes what the chat template of %s writes; its prompts continue by text", model)
    return None


@functools.cache
def _log_missing() -> None:
    logger.info("the package renderers is not installed: tool calls are parsed as <tool_call> JSON alone")


def _writes(name: str, tokenizer: Tokenizer, written: Sequence[tuple[Any, Any, list[int]]]) -> bool:
    try:
        rendering = _made(name, tokenizer)
        return all(
            rendering.render_ids(messages, tools=tools, add_generation_prompt=True) == ids
            for messages, tools, ids in written
        )
    except Exception:  # noqa: BLE001 -- for tokenizers without a family's tokens its renderer raises anything
        return False


def _probes_by_template(tokenizer: Tokenizer) -> list[tuple[Any, Any, list[int]]] | None:
    """Messages, tools and the template's ids of each probe; None if the template refuses them."""
    for as_arguments in (dict[str, Any], lambda value: orjson.dumps(value).decode()):
        found: list[tuple[Any, Any, list[int]]] = []
        try:
            for messages, tools in _probes(as_arguments):
                options: dict[str, Any] = {"tools": tools} if tools else {}
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
                found.append((messages, tools, tokenizer.encode(text, add_special_tokens=False)))
        except Exception:  # noqa: BLE001 -- templates are programs of the model's maker and raise what they like
            continue
        return found
    return None


def _probes(as_arguments: Callable[[dict[str, Any]], Any]) -> list[tuple[list[dict[str, Any]], Any]]:
    """Chats that tell families apart: with and without tools, a system message, values of each type in a call."""
    properties = {"x": {"type": "integer"}, "y": {"type": "string"}}
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": function}]
    arguments = as_arguments({"x": 1, "y": "b", "z": True, "w": {"v": [1.5, None]}})
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    returned = {"role": "tool", "tool_call_id": "call_0", "name": "f", "content": "r"}
    again = [user, {"role": "assistant", "content": "a"}, user]
    return [
        ([user], None),
        ([system, *again], None),
        ([user, called, returned], tools),
        ([system, user, called, returned, {"role": "assistant", "content": "a"}, user], tools),
    ]
