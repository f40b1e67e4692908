"""A rollout engine without a model: answers are a pure function of prompt, seed and weight version.

For tests, crash tests and whole pipelines on machines that train nothing. Imports no torch.

A character tokenizer with a chat template, for tests: no files, no torch.

Ids: 0 pad, 1 end, 2-5 roles, then digits, then letters and signs, so that what digits-and-letters environments need has
ids below 20 and fits the vocabulary of any tiny model.
"""

import asyncio
import hashlib
import math
import random
import string
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollstream.producers.engines.base import (
    CLOSED,
    Capabilities,
    Generation,
    GenerationRequest,
    check_prompt,
    max_new_tokens_of,
)
from rollstream.schemas import ids
from rollstream.schemas.engine_settings import ScriptedSettings
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events.rollouts import VersionSpan
from rollstream.schemas.events.weights import WeightsPublished

SPECIALS = ("<pad>", "<end>", "<system>", "<user>", "<assistant>", "<tool>")
UNKNOWN = "\ufffd"
_FIRST = string.digits + "HLX=?+-* "
_CHARACTERS = _FIRST + "".join(sorted(set(string.printable) - set(_FIRST))) + UNKNOWN


class ScriptedTokenizer:
    """`base.Tokenizer` with one token a character. A message is its role's token, its text and the end token."""

    eos_token_id = 1
    pad_token_id = 0

    def __init__(self) -> None:
        self._texts = (*SPECIALS, *_CHARACTERS)
        self._ids = {text: number for number, text in enumerate(self._texts)}

    def __len__(self) -> int:
        return len(self._texts)

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        """Text of messages; `add_generation_prompt=True` opens the answer. Only `tokenize=False` is known."""
        text = "".join(f"<{message['role']}>{message.get('content', '')}<end>" for message in conversation)
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


MAX_KEPT = 1000
"""Maximum number of requests and loads that are remembered, for observers."""
Script = Callable[[str, random.Random, int], tuple[str, float]]
"""(prompt text, random state of this call, weight version) -> answer, and its log-probability."""


def random_digit(prompt: str, rng: random.Random, version: int) -> tuple[str, float]:
    """Any digit, each as likely as the others."""
    return str(rng.randrange(10)), math.log(0.1)


class ScriptedEngine:
    """`base.Engine` that plays a script. `delay_s`: what each answer takes; `max_length`: tokens of a sequence."""

    def __init__(self, script: Script = random_digit, *, delay_s: float = 0.0, max_length: int | None = None) -> None:
        self.loaded: list[WeightsPublished] = []
        """The newest that were loaded, in order."""
        self.requests: list[GenerationRequest] = []
        """The newest that were asked for, in order."""
        self._script = script
        self._delay_s = delay_s
        self._max_length = max_length
        self._versions: dict[str, int] = {}
        self._tokenizer = ScriptedTokenizer()
        self._delays: set[asyncio.Future[None]] = set()
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        """Has no model."""
        return Capabilities(loads_models=False)

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Cancel calls in progress and refuse later ones."""
        self._is_closed = True
        for delay in self._delays:
            delay.cancel()

    async def generate(self, request: GenerationRequest) -> Generation:
        """The script's answer, cut to `max_new_tokens`; its log-probability is that of the first token."""
        version, max_new_tokens = self._held(request.model_group), self._max_new_tokens(request)
        self.requests.append(request)
        del self.requests[:-MAX_KEPT]
        await self._delay()
        seed = request.seed if request.sampling.temperature else 0
        prompt_sha256 = hashlib.sha256(array("i", request.prompt_ids).tobytes()).hexdigest()
        rng = random.Random(ids.derive_seed(prompt_sha256, seed, version))
        text, logprob = self._script(self._tokenizer.decode(request.prompt_ids), rng, version)
        whole = (*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id)
        sampled = whole[:max_new_tokens]
        span = VersionSpan(model_group=request.model_group, version=version, length=len(sampled))
        logprobs = (logprob,) + (0.0,) * (len(sampled) - 1)
        for token in sampled[:-1] if request.on_tokens is not None else ():
            request.on_tokens((token,))  # pyright: ignore[reportOptionalCall]
            await asyncio.sleep(0)
        return Generation(sampled, logprobs, (span,), "stop" if sampled == whole else "length")

    def tokenizer(self, model_group: str) -> ScriptedTokenizer:
        """The built-in tokenizer. Raises ModelError if the group has no weights."""
        self._held(model_group)
        return self._tokenizer

    def version(self, model_group: str) -> int:
        """Weight version held; -1 before the first."""
        return self._versions.get(model_group, -1)

    async def load(self, published: WeightsPublished, path: Path) -> None:
        """Note the version; the artifact is not read. Raises ModelError if it is not there, or once closed."""
        if self._is_closed:
            raise ModelError(CLOSED)
        if not path.exists():
            raise ModelError(
                f"weights of {published.model_group} version {published.version}: no file {path}; "
                "restore it from a copy"
            )
        self.loaded.append(published)
        del self.loaded[:-MAX_KEPT]
        self._versions[published.model_group] = published.version

    async def unload(self, model_group: str) -> None:
        """Forget the version."""
        self._versions.pop(model_group, None)

    def _held(self, model_group: str) -> int:
        if model_group not in self._versions:
            raise ModelError(f"model group {model_group} has no weights yet; wait for a version to be published")
        return self._versions[model_group]

    def _max_new_tokens(self, request: GenerationRequest) -> int:
        """Tokens that may be sampled. Raises ModelError for a prompt that cannot be read or leaves no room."""
        if self._is_closed:
            raise ModelError(CLOSED)
        check_prompt(request, num_token_ids=len(self._tokenizer))
        return max_new_tokens_of(request, self._max_length, "the scripted model")

    async def _delay(self) -> None:
        """Wait as long as an answer takes. Raises CancelledError if the engine is closed meanwhile."""
        if not self._delay_s:
            await asyncio.sleep(0)
            return
        delay = asyncio.ensure_future(asyncio.sleep(self._delay_s))
        self._delays.add(delay)
        try:
            await delay
        finally:
            self._delays.discard(delay)
            delay.cancel()


def build(settings: ScriptedSettings) -> ScriptedEngine:
    """Function of `EngineKind` that `table` calls. The settings change nothing: see `ScriptedSettings.unused`."""
    return ScriptedEngine()
