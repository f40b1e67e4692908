"""Whether a teacher can score what a policy samples: ids, and how they are drawn. No model is loaded."""

from pathlib import Path
from typing import Any

from rollstream.eventlog.files import tokenizer_sha256

AS_SAMPLED = (
    "servers give log-probabilities at temperature 1 over the whole vocabulary; sample with temperature 1 and without "
    "top_p and top_k, or leave teacher_url out"
)
"""Requirements on a run whose teacher is on a server."""


def misfit(path: str, other: str) -> str | None:
    """The first difference between the vocabularies of two models' folders; "" if there is none, None if one has no
    tokenizer to compare.
    """
    if "" != tokenizer_sha256(path) == tokenizer_sha256(other):
        return ""
    mine, its = tokenizer_of(path), tokenizer_of(other)
    if mine is None or its is None:
        return None
    known, own = its.get_vocab(), mine.get_vocab()
    for text, token_id in sorted(own.items(), key=lambda one: one[1]):
        if known.get(text) != token_id:
            there = f"is {known[text]} there" if text in known else "is not there"
            return f"token {token_id} ({text!r}) {there}, and it has {len(known)} tokens, the model {len(own)}"
    return ""


def tokenizer_of(path: str) -> Any:
    """The tokenizer of a model's folder or hub name; None if it has none."""
    folder = Path(path).expanduser()
    if folder.is_dir() and not tokenizer_sha256(path):
        return None  # transformers would make an empty one
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError):
        return None
