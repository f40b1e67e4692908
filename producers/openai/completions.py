"""OpenAI's completions as values: a prompt as text or as token ids, and its completion. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rollstream.producers.openai.protocol import NOTHING_SENT, Answer, logprobs_of, usage_of
from rollstream.producers.openai.requests import NumLogprobs, SampledRequest

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]


class CompletionRequest(SampledRequest):
    """A request for completions of one prompt."""

    PROMPT_KEY: ClassVar[str] = "prompt"
    prompt: Text | TokenIds | Annotated[list[Text], Field(min_length=1, max_length=1)]
    logprobs: NumLogprobs = 0
    echo: Literal[False] = False

    @property
    def content(self) -> str | list[int]:
        """The one prompt: text, or token ids as they are."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0]
        return first if isinstance(first, str) else [one for one in self.prompt if isinstance(one, int)]


def completion(head: Mapping[str, Any], answers: list[Answer]) -> dict[str, Any]:
    """The whole answer; `head` as for chat completions."""
    choices = [_choice(index, answer) for index, answer in enumerate(answers)]
    return {**head, "object": "text_completion", "choices": choices, "usage": usage_of(answers)}


def chunk(head: Mapping[str, Any], index: int, text: str) -> dict[str, Any]:
    """A piece of a choice's text in a stream."""
    choice = {"index": index, "text": text, "finish_reason": None, "logprobs": None}
    return {**head, "object": "text_completion", "choices": [choice]}


def chunks(
    head: Mapping[str, Any], answers: list[Answer], *, include_usage: bool, sent: Mapping[int, int] = NOTHING_SENT
) -> list[dict[str, Any]]:
    """The same as a stream: what is left of each choice, of whose text `sent` characters are sent, and its end."""
    whole = {**head, "object": "text_completion"}
    choices = [_choice(index, answer) for index, answer in enumerate(answers)]
    left = [{**choice, "text": choice["text"][sent.get(index, 0) :]} for index, choice in enumerate(choices)]
    stream = [{**whole, "choices": [choice]} for choice in left]
    return [*stream, {**whole, "choices": [], "usage": usage_of(answers)}] if include_usage else stream


def _choice(index: int, answer: Answer) -> dict[str, Any]:
    """One choice; its `logprobs` have OpenAI's columns, and the exact token ids beside them."""
    offsets, length = [], 0
    for text in answer.token_texts:
        offsets.append(length)
        length += len(text)
    columns = {
        "tokens": list(answer.token_texts),
        "token_logprobs": list(answer.logprobs) if answer.has_logprobs else None,
        "top_logprobs": None,
        "text_offset": offsets,
    }
    exact = {key: value for key, value in logprobs_of(answer).items() if key not in ("content", "refusal")}
    return {"index": index, "text": answer.text, "finish_reason": answer.finish_reason, "logprobs": columns | exact}
