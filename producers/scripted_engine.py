"""A rollout engine without a model: answers are a pure function of prompt, seed and weight version.

For tests, crash tests and whole pipelines on machines that train nothing. Imports no torch.
"""

import asyncio
import hashlib
import math
import random
from array import array
from collections.abc import Callable
from pathlib import Path

from rollstream.producers.engine import Generation, GenerationRequest
from rollstream.producers.scripted_tokenizer import ScriptedTokenizer
from rollstream.schemas import ids
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events_rollouts import VersionSpan
from rollstream.schemas.events_weights import WeightsPublished

Script = Callable[[str, random.Random, int], tuple[str, float]]
"""(prompt text, random state of this call, weight version) -> answer, and its log-probability."""


def random_digit(prompt: str, rng: random.Random, version: int) -> tuple[str, float]:
    """Any digit, each as likely as the others."""
    return str(rng.randrange(10)), math.log(0.1)


class ScriptedEngine:
    """`engine.Engine` that plays a script. `delay_s` is what each answer takes."""

    def __init__(self, script: Script = random_digit, *, delay_s: float = 0.0) -> None:
        self.loaded: list[WeightsPublished] = []
        """All that was loaded, in order."""
        self.requests: list[GenerationRequest] = []
        """All that was asked for, in order."""
        self._script = script
        self._delay_s = delay_s
        self._versions: dict[str, int] = {}
        self._tokenizer = ScriptedTokenizer()

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """The script's answer, cut to `max_new_tokens`; its log-probability lies on the first token."""
        version = self._held(request.model_group)
        self.requests.append(request)
        await asyncio.sleep(self._delay_s)
        prompt_sha256 = hashlib.sha256(array("i", request.prompt_ids).tobytes()).hexdigest()
        rng = random.Random(ids.derive_seed(prompt_sha256, request.seed, version))
        text, logprob = self._script(self._tokenizer.decode(request.prompt_ids), rng, version)
        whole = (*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id)
        sampled = whole[: request.sampling.max_new_tokens]
        span = VersionSpan(model_group=request.model_group, version=version, length=len(sampled))
        logprobs = (logprob,) + (0.0,) * (len(sampled) - 1)
        return Generation(sampled, logprobs, (span,), "stop" if sampled == whole else "length")

    def tokenizer(self, model_group: str) -> ScriptedTokenizer:
        """The built-in tokenizer. Raises ModelError if the group has no weights."""
        self._held(model_group)
        return self._tokenizer

    def version(self, model_group: str) -> int:
        """Weight version held; -1 before the first."""
        return self._versions.get(model_group, -1)

    async def load(self, published: WeightsPublished, path: Path) -> None:
        """Note the version; the artifact is not read. Raises ModelError if it is not there."""
        if not path.exists():
            raise ModelError(f"weights of {published.model_group} version {published.version}: no file {path}")
        self.loaded.append(published)
        self._versions[published.model_group] = published.version

    def _held(self, model_group: str) -> int:
        if model_group not in self._versions:
            raise ModelError(f"model group {model_group} has no weights yet")
        return self._versions[model_group]
