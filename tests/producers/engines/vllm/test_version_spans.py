"""The versions that a server names with an answer's tokens: they tile the tokens, or the answer is refused."""

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.eventlog.http.http_json import HttpServer
from rollstream.producers.engines.vllm.answers import LostVersionError, NamedVersions, spans_of
from rollstream.producers.engines.vllm.base_model import BaseModel
from rollstream.producers.engines.vllm.version_files import Version
from rollstream.schemas.errors import ModelError
from tests.producers.engines.engine_rig import published
from tests.producers.engines.vllm.server_rig import request

NUM_VERSIONS = 4

Spans = list[tuple[int, int, int]]
"""Version, start and end of each."""

LENGTHS = st.lists(st.tuples(st.integers(0, NUM_VERSIONS - 1), st.integers(1, 50)), min_size=1, max_size=8)
"""Version and number of tokens of each span."""


def version(number: int, weights_format: str = "full") -> Version:
    base = BaseModel("/base", None, (), None, 10, {}, *[frozenset[str]()] * 3)
    made_of = published(Path("/base"), number, weights_format=weights_format)
    return Version(made_of, base, f"policy-v{number}", Path("/none"), Path("/none"), None)


def found(spans: Spans, length: int, weights_format: str = "full") -> list[tuple[int, int]]:
    """Version and length of each span that an answer of so many tokens gets."""
    http, named = HttpServer("http://server:1", timeout_s=1), NamedVersions()
    for number in range(NUM_VERSIONS):
        named.add(version(number), {"policy-v0": 1})
    written: list[dict[str, Any]] = [{"version": f"policy-v{one}", "start": at, "end": end} for one, at, end in spans]
    given_spans = spans_of(http, request(), version(3, weights_format), named, length, written)
    return [(span.version, span.length) for span in given_spans]


def tiled(lengths: list[tuple[int, int]]) -> Spans:
    """Spans that follow each other, by their lengths."""
    ends = accumulate((length for _, length in lengths), initial=0)
    return [(one, at, end) for (one, _), (at, end) in zip(lengths, pairwise(ends), strict=True)]


@pytest.mark.parametrize(
    ("spans", "length", "reported"),
    [
        ([(0, 0, 2), (1, 3, 5)], 5, "that do not follow each other"),
        ([(0, 1, 5)], 5, "that do not follow each other"),
        ([(0, 0, 3), (1, 2, 5)], 5, "that do not follow each other"),
        ([(1, 2, 5), (0, 0, 2)], 5, "that do not follow each other"),
        ([(0, 0, 5), (1, 0, 5)], 5, "that do not follow each other"),
        ([(0, 0, 0), (1, 0, 5)], 5, "that do not follow each other"),
        ([(0, 0, 5), (1, 5, 5)], 5, "that do not follow each other"),
        ([(0, 0, 3), (1, 3, 2), (2, 2, 5)], 5, "that do not follow each other"),
        ([(0, 0, -1)], 5, "that do not follow each other"),
        ([(0, 0, 2), (1, 2, 4)], 5, "over 4 of 5 tokens"),
        ([(0, 0, 2), (1, 2, 6)], 5, "over 6 of 5 tokens"),
        ([], 5, "over 0 of 5 tokens"),
    ],
)
def test_spans_with_gaps_or_overlaps_or_too_short_or_long_a_cover_are_refused(
    spans: Spans, length: int, reported: str
) -> None:
    with pytest.raises(ModelError, match=f"http://server:1 gave version spans {reported}"):
        found(spans, length)


def test_a_span_of_weights_that_the_server_was_never_given_is_a_lost_version() -> None:
    with pytest.raises(LostVersionError, match="answers with the weights policy-v9"):
        found([(0, 0, 2), (9, 2, 5)], 5)


def test_an_adapters_answer_is_of_its_version_alone_whatever_the_server_names() -> None:
    assert found([(0, 0, 2), (1, 4, 3)], 5, "lora") == [(3, 5)]


@given(LENGTHS)
def test_spans_that_tile_the_tokens_are_the_answers(lengths: list[tuple[int, int]]) -> None:
    assert found(tiled(lengths), sum(length for _, length in lengths)) == lengths


@given(LENGTHS, st.data())
def test_spans_with_one_bound_moved_are_refused(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    spans = tiled(lengths)
    index, is_end = data.draw(st.integers(0, len(spans) - 1)), data.draw(st.booleans())
    by = data.draw(st.integers(-60, 60).filter(bool))
    number, start, end = spans[index]
    spans[index] = (number, start, end + by) if is_end else (number, start + by, end)
    with pytest.raises(ModelError, match="gave version spans"):
        found(spans, sum(length for _, length in lengths))
