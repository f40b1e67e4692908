"""Options of a request that an answer here does not follow, by their treatment (docs/gateway.md). Pure."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "client_metadata",
        "store",
        "service_tier",
        "speed",
        "inference_geo",
        "cache_control",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
    }
)
"""Bookkeeping of a provider: no answer depends on it."""
RECORDED: Mapping[str, tuple[Any, ...]] = {
    "reasoning_effort": (),
    "reasoning": ({},),
    "thinking": ({"type": "disabled"},),
    "output_config": ({},),
    "verbosity": (),
    "parallel_tool_calls": (True,),
    "context_management": ({}, []),
    "truncation": ("disabled",),
}
"""Options on a provider's model's reasoning and style, each with values that request nothing: the run's settings
decide. A recorded rollout notes the requested values."""
ENFORCED: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Options that a server would apply to each token, each with values that request nothing. A recorded rollout is sampled
according to the run's settings and notes the requested values; elsewhere a request is refused."""
ONLY_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"modalities": (["text"],)}
"""Keys that are accepted only with these values."""
KNOWN = IGNORED | RECORDED.keys() | ENFORCED.keys() | ONLY_NEUTRAL.keys()


def unmet(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Requested options that are not followed."""
    table = {**RECORDED, **ENFORCED}
    return {key: extra[key] for key in sorted(extra.keys() & table) if extra[key] not in table[key]}


def unenforced(extra: Mapping[str, Any]) -> str | None:
    """The first key whose value a server would have to hold the tokens to."""
    return next((key for key in unmet(extra) if key in ENFORCED), None)


TOOL_CHOICES = ("auto", "none", "required")
ALLOWED_TOOLS = "allowed_tools"


def wrong_tool_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The error in a `tool_choice` for these tools, and the remedy; None if it is right."""
    if isinstance(choice, str) and choice in TOOL_CHOICES:
        return None
    known = ", ".join(map(repr, TOOL_CHOICES))
    if not isinstance(choice, Mapping):
        return f"{choice!r:.100} is unknown; use {known} or an object that names one of tools"
    for one in _chosen(choice):
        name = _name_of(one)
        is_provided = not is_function(one) and any(tool.get("type") == one.get("type") for tool in tools)
        if name is None and not is_provided:
            return f"{choice!r:.100} names no tool; use {known} or an object that names one of tools"
        if not is_provided and name not in {_name_of(tool) for tool in tools}:
            return f"tool {name!r:.100} is not one of tools; add it there, or choose another one"
    return None


def _chosen(choice: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The tools that a choice names. Chat completions nest a list of allowed ones once more than responses do."""
    if choice.get("type") != ALLOWED_TOOLS:
        return [choice]
    listed = choice.get(ALLOWED_TOOLS, choice)
    tools = listed.get("tools") if isinstance(listed, Mapping) else None
    return [one for one in tools if isinstance(one, Mapping)] if isinstance(tools, list) and tools else [{}]


def _name_of(tool: Mapping[str, Any]) -> str | None:
    described = tool.get(str(tool.get("type", "function")))
    name = (described if isinstance(described, Mapping) else tool).get("name")
    return name if isinstance(name, str) else None


def is_alias(name: str, patterns: Iterable[str]) -> bool:
    """Whether the name of a model is one of those of other providers that stand for the model here."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_function(tool: Mapping[str, Any]) -> bool:
    """Whether the client runs a tool, and describes it as a function."""
    return tool.get("type", "function") == "function"


def left_out(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """Tools that no prompt here offers: a provider's own, by type and name."""
    others = ((tool.get("type"), _name_of(tool)) for tool in tools if not is_function(tool))
    return [" ".join(str(part) for part in parts if part) for parts in others]
