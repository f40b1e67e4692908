"""The contract of `StreamWords`, run on every API's: what is sent of a text, once, and how a stream ends."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from rollstream.producers.openai.completions import CompletionRequest
from rollstream.producers.openai.protocol import Answer
from rollstream.producers.openai.requests import ChatRequest
from rollstream.producers.openai.responses import RespondedRequest, ResponsesRequest, ResponseWords
from rollstream.producers.openai.stream_words import Answered, ChatWords, CompletionWords, MessageWords, StreamWords

MESSAGES: Any = [{"role": "user", "content": "3+4="}]
CHAT = ChatRequest(model="policy", messages=MESSAGES)
STREAMS: dict[str, Callable[[], StreamWords]] = {
    "chat": lambda: ChatWords(CHAT),
    "completions": lambda: CompletionWords(CompletionRequest(model="policy", prompt="3+4=")),
    "messages": lambda: MessageWords(CHAT, 4),
    "responses": lambda: ResponseWords(
        ResponsesRequest(model="policy", input="3+4="),
        RespondedRequest(model="policy", messages=MESSAGES, own_id="0123"),
    ),
}
IDS = tuple(range(3))
ANSWERED = Answered(
    [Answer("seven", IDS, IDS, ("sev", "en", ""), (-0.5,) * 3, "stop", (), "run-1/policy", 2)], "0123", 7
)


@pytest.fixture(params=sorted(STREAMS))
def stream(request: pytest.FixtureRequest) -> StreamWords:
    return STREAMS[request.param]()


def events(sent: bytes) -> list[Any]:
    """The bodies of server-sent events, each of which ends with an empty line."""
    assert sent.endswith(b"\n\n") or not sent
    bodies = [line[6:] for line in sent.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(body) for body in bodies if body != "[DONE]"]


def text_of(found: list[Any]) -> str:
    """The text of all deltas."""
    parts: list[str] = []
    for event in found:
        choice = (event.get("choices") or [{}])[0]
        delta = event["delta"] if event.get("type", "").endswith("delta") else choice.get("delta")
        part = delta if isinstance(delta, str) else (delta or {}).get("text") or (delta or {}).get("content")
        parts.append(part or choice.get("text") or "")
    return "".join(parts)


@pytest.mark.parametrize("pieces", [(), ("seven",), ("se", "v"), ("s", "e", "v", "en")])
def test_the_deltas_are_the_text_however_much_of_it_was_sent_before_the_end(
    stream: StreamWords, pieces: tuple[str, ...]
) -> None:
    before = [event for piece in pieces for event in events(stream.piece(0, piece))]
    assert text_of(before) == "".join(pieces)
    assert text_of([*before, *events(stream.end(ANSWERED))]) == "seven"


def ids_in(event: Any) -> set[str]:
    """The id of the answer that an event names, without what says of which kind it is."""
    bodies = (event, event.get("message") or {}, event.get("response") or {})
    return {body["id"].rpartition("_")[2].rpartition("-")[2] for body in bodies if "id" in body}


def test_an_answer_keeps_its_own_id_only_if_none_was_sent_before(stream: StreamWords) -> None:
    assert set().union(*map(ids_in, events(stream.end(ANSWERED)))) == {"0123"}


def test_all_events_of_an_answer_name_one_id(stream: StreamWords) -> None:
    found = [*events(stream.piece(0, "sev")), *events(stream.piece(0, "en")), *events(stream.end(ANSWERED))]
    assert len(set().union(*map(ids_in, found))) == 1
