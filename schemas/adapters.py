"""The rule by which an adapter's publisher and its readers agree on its tensors."""

from collections.abc import Iterable

EMBEDDINGS = frozenset({"embed_tokens", "lm_head"})
"""Names of the modules that may have one weight together."""


def has_embeddings(target_modules: Iterable[str]) -> bool:
    """Whether an adapter is on the embeddings or the head, of which peft keeps the base weights beside it."""
    return not EMBEDDINGS.isdisjoint(target_modules)
