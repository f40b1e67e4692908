"""The interface of a rollout engine: generate with exact tokens, and load weight versions.

Implemented by `transformers.TransformersEngine`, `vllm.VllmEngine`, `openai.OpenAIEngine`, `scripted.ScriptedEngine`
for tests, and the engines of installed packages (see `table`). `tests/contracts/test_engine_contract.py` tests all of
them against the docstrings here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rollstream.eventlog.files import base_sha256, tokenizer_sha256
from rollstream.schemas.config import RunConfig
from rollstream.schemas.engine_settings import EngineSettings
from rollstream.schemas.errors import EnvironmentRunError, ModelError, PromptRefusedError, PromptTooLongError
from rollstream.schemas.events.rollouts import VersionSpan
from rollstream.schemas.events.weights import WeightsPublished
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.settings import Sampling
from rollstream.schemas.tokens import MAX_KEPT, KeptIds

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to continue."""

    model_group: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int
    """Seed of this call; with `deterministic` all noise derives from it and the token's index."""
    rollout_id: str = ""
    """Rollout that makes the request: rollouts of a group begin with the same prompt, which one server's cache holds.
    Empty: any.
    """
    on_tokens: Callable[[Sequence[int]], None] | None = field(default=None, compare=False, repr=False)
    """Called in the event loop with ids that were sampled since, in order, before the answer is there. An engine that
    gets its answers whole never calls it; the last ids may come with the answer alone."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Sampled ids and log-probabilities of equal length (T,)."""

    token_ids: tuple[int, ...]
    """Sampled ids, including the end token if it was sampled."""
    logprobs: tuple[float, ...]
    """Log-probability of each token under the distribution that it was sampled from (after temperature, top-k and
    top-p).
    """
    spans: tuple[VersionSpan, ...]
    """Weight versions that sampled the tokens, in order: their lengths add up to T."""
    finish_reason: FinishReason
    """`stop`: the last token is an end token. `length`: a limit was reached."""
    kept: KeptIds | None = None
    """With `keeps_ids`: the ids that each token was sampled from."""


def keeps_ids(sampling: Sampling) -> bool:
    """Whether the ids that top_p and top_k leave are to be given with each token."""
    return bool(sampling.record_kept_ids and sampling.temperature and (sampling.top_p < 1 or sampling.top_k))


def check_generation(generation: Generation) -> None:
    """Raises ModelError for arrays of different lengths, no token, or a log-probability that is not finite.

    An answer of a frozen engine has neither log-probabilities nor spans.
    """
    if generation.token_ids and not generation.logprobs and not generation.spans:
        return
    num_tokens, num_logprobs = len(generation.token_ids), len(generation.logprobs)
    num_spanned = sum(span.length for span in generation.spans)
    if not num_tokens == num_logprobs == num_spanned or not num_tokens:
        raise ModelError(
            f"engine returned {num_tokens} tokens, {num_logprobs} logprobs, spans over "
            f"{num_spanned}; all three must be equal: correct the engine"
        )
    if not all(map(math.isfinite, generation.logprobs)):
        raise ModelError(
            "engine returned a log-probability that is not a finite number; correct the engine, or its weights"
        )
    if generation.kept is not None and len(generation.kept.lengths) != num_tokens:
        raise ModelError(
            f"engine returned kept ids of {len(generation.kept.lengths)} tokens with {num_tokens} tokens; both must be "
            "equal: correct the engine"
        )
    num_kept = 0 if generation.kept is None else len(generation.kept.ids)
    if (error := kept_error(num_tokens, num_kept)) is not None:
        raise error


def kept_error(num_tokens: int, num_kept: int) -> ModelError | None:
    """The error of an answer, whole or begun, whose kept ids no record can hold; None if one can."""
    if num_tokens + num_kept < MAX_KEPT:
        return None
    return ModelError(
        f"the {num_tokens} tokens of an answer were sampled from {num_kept} ids in all, more than a record holds "
        f"({MAX_KEPT}); lower top_p, set top_k, or leave them out (sampling.record_kept_ids: false)"
    )


def check_prompt(request: GenerationRequest, *, num_token_ids: int) -> None:
    """Raises PromptRefusedError for a prompt that is empty, or has ids beyond the model's `num_token_ids`."""
    prompt_ids = request.prompt_ids
    if not len(prompt_ids):
        raise PromptRefusedError(f"a prompt for model group {request.model_group} has no tokens; add a message")
    if min(prompt_ids) < 0 or max(prompt_ids) >= num_token_ids:
        odd = next(one for one in prompt_ids if not 0 <= one < num_token_ids)
        raise PromptRefusedError(
            f"a prompt for model group {request.model_group} has the token id {odd}; its model knows 0 to "
            f"{num_token_ids - 1}; make the prompt with that model's tokenizer"
        )


def max_new_tokens_of(request: GenerationRequest, max_length: int | None, model: str) -> int:
    """Most tokens that may be sampled of a model that takes sequences of `max_length` tokens (None: any).

    Raises PromptTooLongError if the prompt leaves room for none.
    """
    length, wanted = len(request.prompt_ids), request.sampling.max_new_tokens
    if max_length is None:
        return wanted
    if length >= max_length:
        raise PromptTooLongError(
            f"a prompt of {length} tokens leaves no room in {model}, which takes {max_length}; make the conversation "
            "shorter (max_turns)"
        )
    return min(wanted, max_length - length)


def check_base_model(published: WeightsPublished, base_model: str) -> None:
    """Raises ModelError if the model's folder here has other files than where the version was trained: of the
    tokenizer, or weights below an adapter.
    """
    found = tokenizer_sha256(base_model)
    of_weights = base_sha256(base_model, published.base_sha256) if published.base_sha256 else ""
    if "" != published.tokenizer_sha256 != found != "":
        raise ModelError(
            f"version {published.version} of {published.model_group} was trained with another tokenizer than that of "
            f"model {base_model} here; copy the tokenizer's files from where it was trained"
        )
    if not published.is_above(of_weights, published.base_model):
        raise ModelError(
            f"version {published.version} of {published.model_group} is an adapter of other weights than those of "
            f"model {base_model} here; copy the weight files from where it was trained"
        )


def base_model_of(published: WeightsPublished, permissions: Permissions | None) -> str:
    """The base model of a version, as an engine here loads it; without `permissions` it loads none.

    Raises NotAllowedError for one that may not be loaded, ModelError for one with other files, see `check_base_model`.
    """
    base_model = published.base_model
    if permissions is not None:
        base_model = permissions.model_path(base_model, "base model")
    check_base_model(published, base_model)
    return base_model


class DeviceLostError(ModelError):
    """This process cannot use its GPU any more: the service ends, and its next start goes on."""


CLOSED = "the rollout engine is closed, because its service is stopping; start the service again"
"""Message for a request after `close`."""


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


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a prompt that no chat template wrote, after the token that the tokenizer begins sequences with (BOS,
    if it has one), unless the text begins with it. Tokens that it would add at the end are left out.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    first, *rest = tokenizer.encode(text) or [-1]
    return [first, *ids] if rest[: len(ids)] == ids != [] and first != ids[0] else ids


def ids_after(tokenizer: Tokenizer, text: str, last_id: int) -> list[int]:
    """Token ids of a text that goes on after a token.

    Some tokenizers (Llama 2, Mistral, Phi-3) write a `▁` at the beginning of a text, which only what begins one has:
    with these the text is encoded after that token's, if it is a special one, else after a line end.
    """
    ids, begun = (tokenizer.encode(one, add_special_tokens=False) for one in ("a", "\n"))
    if tokenizer.encode("\na", add_special_tokens=False) != [*begun, *ids]:
        is_special = not tokenizer.decode([last_id], skip_special_tokens=True)
        before = (tokenizer.decode([last_id], skip_special_tokens=False) if is_special else "") or "\n"
        begun = tokenizer.encode(before, add_special_tokens=False)
        whole = tokenizer.encode(before + text, add_special_tokens=False)
        if begun and whole[: len(begun)] == begun:
            return whole[len(begun) :]
    return tokenizer.encode(text, add_special_tokens=False)


def space_before(tokenizer: Tokenizer, token_id: int, last_id: int) -> str:
    """The space of a token that is in a text after another token, and not in the token's own text: the decoders of the
    same tokenizers leave out one at the beginning of a text.
    """
    last, text = (tokenizer.decode([one], skip_special_tokens=False) for one in (last_id, token_id))
    whole = tokenizer.decode([last_id, token_id], skip_special_tokens=False)
    return " " if whole == f"{last} {text}" else ""


class NoTokenizer(Tokenizer):
    """Tokenizer of a model that another training backend has: ids are taken as they come, and no text becomes ids."""

    eos_token_id = -1
    MESSAGE = (
        "the model is another training backend's, so nothing is sampled or tokenised here; play rollouts that exist "
        "(recorded, remote_workflow) and leave retokenise off"
    )

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Raises EnvironmentRunError."""
        raise EnvironmentRunError(self.MESSAGE)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises EnvironmentRunError."""
        raise EnvironmentRunError(self.MESSAGE)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Raises EnvironmentRunError."""
        raise EnvironmentRunError(self.MESSAGE)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of an engine. A feature built on one does not apply to engines without it."""

    loads_models: bool
    """Loads the base model that WeightsPublished names, which permissions then decide about, and samples from it, so
    that a learner that recomputes the recorded log-probabilities finds the same."""
    is_frozen: bool = False
    """Its weights are not ours: version 0 from the beginning, `load` is refused, and answers have neither
    log-probabilities nor spans, so that they are recorded and never trained."""


class Engine(Protocol):
    """Generates for any number of model groups; holds one weight version of each.

    Methods are called from one event loop and must not block it. Calls of `generate` may overlap each other and `load`;
    `load` and `unload` of different model groups may overlap, those of one model group do not.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Known once the engine has started."""
        ...

    async def start(self) -> None:
        """Begin to serve."""
        ...

    async def close(self) -> None:
        """Stop serving: calls in progress are cancelled, later calls and loads raise ModelError. Also called if `start`
        failed.
        """
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample until an end token, `sampling.max_new_tokens` or the longest sequence that the model takes.

        All noise derives from the seed: equal requests on an equal version give equal tokens, except for rounding,
        which depends on the other requests; at temperature 0 the seed has no effect. A caller that is cancelled frees
        what its request takes; neither that nor a request that fails disturbs others.

        Raises ModelError if the group has no weights, the prompt is empty or has ids that the model does not know,
        PromptTooLongError if it leaves no room for a token, DeviceLostError if only another process can use the GPU.
        """
        ...

    def tokenizer(self, model_group: str) -> Tokenizer:
        """Tokenizer of the group's base model. Raises ModelError if the group has no weights."""
        ...

    def version(self, model_group: str) -> int:
        """Weight version held; -1 before the first."""
        ...

    async def load(self, published: WeightsPublished, path: Path) -> None:
        """Hold this version: requests made after the return are generated with it; `path` is its verified artifact.

        Raises ModelError if it cannot be loaded, OSError if its disk may be back; then the version before it stays, and
        goes on generating as before.
        """
        ...

    async def unload(self, model_group: str) -> None:
        """Free what a model group takes, if it has weights; it may be loaded again."""
        ...


@dataclass(frozen=True, slots=True)
class EngineKind:
    """The object of an entry point of the group `rollstream.engines`: a kind of engine, and how to create one."""

    settings: type[EngineSettings]
    """Its `kind` is the entry point's name."""
    build: Callable[[Any], Engine]
    """Given an instance of `settings`; the class of the engine will do. It is started afterwards. Raises ConfigError
    or ModelError for settings that cannot be met here."""
    check: Callable[[Any, RunConfig], None] | None = None
    """Given such an instance and the configuration of a run, before the run begins. Raises ConfigError for settings
    that the engine would refuse, drop or misread."""
