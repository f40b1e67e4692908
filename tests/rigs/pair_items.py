"""Answers to prompts as the learner compares them."""

import hashlib
from array import array
from collections.abc import Iterable

from rollstream.learner.algorithms.pairs import Item

Scores = tuple[float | None, float | None, float]


def packed(*token_ids: int) -> bytes:
    """Token ids as this machine's int32."""
    return array("i", token_ids).tobytes()


def item_of(owner: tuple[str, str], prompt: Iterable[int], answer: Iterable[int], scores: Scores) -> Item:
    """An answer that ends its sequence."""
    before, after = packed(*prompt), packed(*answer)
    return Item(owner, before + after, len(before), len(before + after), hashlib.sha256(before).digest(), scores)
