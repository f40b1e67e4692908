"""A character tokenizer with a chat template, for tests: no files, no torch.

Ids: 0 pad, 1 end, 2-5 roles, then digits, then letters and signs, so that what digits-and-letters environments need has
ids below 20 and fits the vocabulary of any tiny model.
"""

import string
from collections.abc import Sequence
from typing import Any

SPECIALS = ("<pad>", "<end>", "<system>", "<user>", "<assistant>", "<tool>")
UNKNOWN = "\ufffd"
_FIRST = string.digits + "HLX=?+-* "
_CHARACTERS = _FIRST + "".join(sorted(set(string.printable) - set(_FIRST))) + UNKNOWN


class ScriptedTokenizer:
    """`engine.Tokenizer` with one token a character. A message is its role's token, its text and the end token."""

    eos_token_id = 1
    pad_token_id = 0

    def __init__(self) -> None:
        self._texts = (*SPECIALS, *_CHARACTERS)
        self._ids = {text: number for number, text in enumerate(self._texts)}

    def __len__(self) -> int:
        return len(self._texts)

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        """Text of messages; `add_generation_prompt=True` opens the answer. Only `tokenize=False` is known."""
        text = "".join(f"<{message['role']}>{message['content']}<end>" for message in conversation)
        return text + "<assistant>" if options.get("add_generation_prompt") else text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """One id a character or special token; there are no tokens to add."""
        found: list[int] = []
        at = 0
        while at < len(text):
            special = next((name for name in SPECIALS if text.startswith(name, at)), None)
            piece = special or text[at]
            found.append(self._ids.get(piece, self._ids[UNKNOWN]))
            at += len(piece)
        return found

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        kept = [number for number in token_ids if not skip_special_tokens or number >= len(SPECIALS)]
        return "".join(self._texts[number] for number in kept)
