"""What the rollout worker asks of a rollout engine: generate with exact tokens, and load weight versions.

Implemented by `transformers_engine.TransformersEngine` and, for tests, `scripted_engine.ScriptedEngine`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollstream.schemas.events_rollouts import VersionSpan
from rollstream.schemas.events_weights import WeightsPublished
from rollstream.schemas.settings import Sampling


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to go on with."""

    model_group: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int
    """Of this call; with `deterministic` all noise derives from it and the token's index."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled: ids and log-probabilities of equal length (T,)."""

    token_ids: tuple[int, ...]
    """With the end token, if it was sampled."""
    logprobs: tuple[float, ...]
    """Of each token under the distribution that it was sampled from (after temperature, top-k and top-p)."""
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    """`stop` (end token) or `length`."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that a session uses."""

    eos_token_id: int

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Text (`tokenize=False`) of messages; `add_generation_prompt=True` opens the answer."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        ...


class Engine(Protocol):
    """Generates for any number of model groups; holds one weight version of each."""

    async def start(self) -> None:
        """Begin to serve."""
        ...

    async def close(self) -> None:
        """Stop serving; waiting requests are cancelled."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample until the end token or `sampling.max_new_tokens`. Raises ModelError if the group has no weights."""
        ...

    def tokenizer(self, model_group: str) -> Tokenizer:
        """Tokenizer of the group's base model. Raises ModelError if the group has no weights."""
        ...

    def version(self, model_group: str) -> int:
        """Weight version held; -1 before the first."""
        ...

    async def load(self, published: WeightsPublished, path: Path) -> None:
        """Generate with this version from now on; `path` is its verified artifact. Raises ModelError."""
        ...
