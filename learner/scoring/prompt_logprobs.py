"""Log-probabilities of a prompt from servers of completions: the request and the parsed answer. Pure.

`prompt_logprobs` is vLLM's own and names each token by its id. `echo` with `logprobs` is of the older completions API
and names tokens by their text, or by id if the server can (`return_tokens_as_token_ids`). Each name is compared with
the requested id.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rollstream.eventlog.http.http_json import excerpt

ID_PREFIX = "token_id:"
"""Before the id of a token that is named by its id in place of its text."""
BYTES_PREFIX = "bytes:"
"""Before the bytes of a token that ends within a character."""
REMEDY = "look at the teacher's tokenizer, it must be the policy's"


class OtherTokensError(Exception):
    """A server scored other tokens than it was asked for."""


class ScoredToken(NamedTuple):
    """One token of a prompt as the server names it."""

    name: str | int
    """Text, or the id."""
    logprob: float


class Way(NamedTuple):
    """One way to ask."""

    asks: dict[str, Any]
    """Keys of the request beside model and prompt. `max_tokens` is 1: not every server takes 0 for none."""
    read: Callable[[Any, Sequence[int]], list[ScoredToken]]
    """All tokens but the first, of an answer to these ids. Raises LookupError, TypeError or ValueError without them."""
    names_ids: bool
    """Each token is named by its id: the vocabulary is to be compared apart."""


def _own(found: Any, ids: Sequence[int]) -> list[ScoredToken]:
    scored = found["choices"][0]["prompt_logprobs"][1:]
    return [_named(token_id, one) for token_id, one in zip(ids[1:], scored, strict=True)]


def _named(token_id: int, one: Any) -> ScoredToken:
    name = str(token_id) if str(token_id) in one else next(iter(one), "")
    return ScoredToken(int(name), float(one[name]["logprob"]))


def _echoed(found: Any, ids: Sequence[int]) -> list[ScoredToken]:
    echo = found["choices"][0]["logprobs"]
    tokens, values = echo["tokens"][1 : len(ids)], echo["token_logprobs"][1 : len(ids)]
    if len(tokens) != len(ids) - 1:
        raise ValueError(f"{len(tokens) + 1} tokens for {len(ids)}")
    return [ScoredToken(str(name), float(value)) for name, value in zip(tokens, values, strict=True)]


OWN = Way({"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}, _own, names_ids=True)
ECHO = Way(
    {"max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True},
    _echoed,
    names_ids=False,
)
WAYS = (OWN, ECHO)


def compared(scored: Sequence[ScoredToken], ids: Sequence[int], tokenizer: Any) -> list[float]:
    """The log-probabilities. `tokenizer`: the policy's. Raises OtherTokensError naming the first other token."""
    for index, (one, token_id) in enumerate(zip(scored, ids[1:], strict=True), start=1):
        where = f"at index {index} of a prompt: {excerpt(one.name)} for {token_id}"
        number = _id_of(one.name)
        if number is None and tokenizer is None:
            remedy = "the model has no tokenizer to compare it with; add its tokenizer's files to the model's folder"
            raise OtherTokensError(f"named a token by its text {where}: {remedy}")
        is_same = number == token_id if number is not None else _is_text(str(one.name), token_id, tokenizer)
        if not is_same:
            raise OtherTokensError(f"scored another token than asked {where}; {REMEDY}")
    return [one.logprob for one in scored]


def _id_of(name: str | int) -> int | None:
    if isinstance(name, int):
        return name
    digits = name.removeprefix(ID_PREFIX)
    return int(digits) if digits != name and digits.isdecimal() else None


def _is_text(text: str, token_id: int, tokenizer: Any) -> bool:
    """Whether a text is a token's: alone it may lose a space, and a part of a character has no text of its own."""
    mine = tokenizer.decode([token_id])
    if "\ufffd" in mine:
        return "\ufffd" in text or text.startswith(BYTES_PREFIX)
    return text.lstrip(" ") == mine.lstrip(" ") or text == tokenizer.convert_ids_to_tokens([token_id])[0]
