"""The policy in training: a transformers model, whole or with LoRA adapters, and its weights as deterministic bytes.

The policy as it was at a job's base version, for losses that compare with it. Never trained.
"""

import copy
import hashlib
import logging
import os
from functools import partial
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer

from rollstream.eventlog.files import base_sha256, tokenizer_sha256
from rollstream.learner.model.loading import (
    compile_layers,
    compute_dtype_of,
    empty_module,
    enable_checkpointing,
    frozen_copy,
    has_dropout,
    has_plain_head,
    inner,
    load_module,
)
from rollstream.learner.model.logprobs import Head, fuses, kept_offsets, only_kept, selected_logprobs
from rollstream.learner.model.memory import WITHOUT_COPY, GradientMemory, within_memory
from rollstream.learner.model.micro_batch import MicroBatch
from rollstream.learner.model.ranks import Ranks
from rollstream.learner.model.tensor_file import from_bytes, published_pieces, to_bytes
from rollstream.learner.model.tree_attention import hidden_states, longest_row
from rollstream.schemas.devices import choose_cublas_workspace, device_of
from rollstream.schemas.errors import ModelError
from rollstream.schemas.revisions import FUSES_KERNELS_SINCE, SELECTS_LOGPROBS_SINCE, SHARES_KEYS_SINCE
from rollstream.schemas.settings import ModelSettings, has_embeddings

logger = logging.getLogger(__name__)


class PolicyModel:
    """A model on its device; its parameters stay float32 unless they are below an adapter.

    Forwards compute in bfloat16 where the settings (or the GPU) say so; published weights have that type too.
    """

    def __init__(
        self,
        settings: ModelSettings,
        *,
        seed: int,
        path: str | None = None,
        shares_base: bool = False,
        has_weights: bool = True,
        is_trained: bool = True,
    ) -> None:
        """Load base weights; adapters begin as `seed` says. Raises ModelError naming what cannot be loaded.

        `path`: what the settings' path, as written, stands for here. `shares_base`: adapters use the base model of
        other policies of this process where they can, see `can_share`; nobody may change its parameters. Without
        `has_weights` all parameters and buffers are on the meta device, and nothing is known about their results. Not
        `is_trained`, it holds its parameters in the type that it computes in.
        """
        self.settings = settings
        self.ranks = Ranks()
        self._logged, self._gradients = "", None
        where = f"model {settings.path}: device"
        self.device = torch.device(device_of(settings.device, torch.cuda.device_count(), where))
        self.compute_dtype = compute_dtype_of(settings, self.device)
        self._published_dtype = torch.float32 if settings.lora else self.compute_dtype
        self.tokenizer_sha256 = tokenizer_sha256(path or settings.path)
        load = partial(load_module, shares_base=shares_base, is_trained=is_trained) if has_weights else empty_module
        self._longest_shared, self._why_apart = 0.0, "its logits are more than a linear map of its hidden states"
        with within_memory(f"model {settings.path} on {self.device}"):
            self.module: Any = load(settings, path or settings.path, self.device, seed=seed)
            # of a hub name only now that its weights are in the cache
            self.base_sha256 = base_sha256(path or settings.path) if settings.lora and has_weights else ""
            self.selects_logprobs = has_weights and has_plain_head(self.module)
            """Gather hidden states before the head; else logits are made of all tokens at once."""
            if self.selects_logprobs:
                decoder = inner(self.module).get_decoder()
                self._longest_shared, self._why_apart = longest_row(decoder, self.device, self.compute_dtype)
        self._tied = frozenset(getattr(inner(self.module), "all_tied_weights_keys", None) or ())
        self.may_fuse, self.copies_keys = settings.fused_kernels, False
        """Compute log-probabilities by the fused kernels where they work; copy keys and values for each query head."""
        self._has_dropout = has_dropout(self.module)
        if settings.gradient_checkpointing:
            enable_checkpointing(inner(self.module), settings.path)
        if settings.compile:
            compile_layers(inner(self.module), settings.path, has_weights=has_weights)
        self.use_dropout(True)

    @property
    def weights_format(self) -> str:
        """`full` or `lora`."""
        return "lora" if self.settings.lora else "full"

    @property
    def num_token_ids(self) -> int:
        """Token ids that the model has an embedding for."""
        return len(self.module.get_input_embeddings().weight)

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Parameters that are trained, by sorted name."""
        return sorted((n, p) for n, p in self.module.named_parameters() if p.requires_grad)

    def clear_gradients(self, num_micro_batches: int) -> None:
        """Let go of all gradients and their memory, before those of so many micro-batches are summed."""
        self.module.zero_grad(set_to_none=True)
        if self._gradients is None:
            self._gradients = GradientMemory(() if self.settings.compile else [one for _, one in self.trainable()])
        self._gradients.clear(sums=num_micro_batches > 1)

    def adapter_config(self) -> dict[str, JsonValue] | None:
        """peft's adapter configuration as JSON; None for full weights."""
        if not self.settings.lora:
            return None
        config = {name: _as_json(value) for name, value in self.module.peft_config["default"].to_dict().items()}
        return {**config, "base_model_name_or_path": self.settings.path, "inference_mode": True}

    def weights(self) -> dict[str, Tensor]:
        """The tensors to publish, by sorted name: without tied duplicates; for LoRA by peft's names."""
        if self.settings.lora:
            from peft import get_peft_model_state_dict

            # peft's default, auto, asks the hub for the base model's configuration, of every version.
            embeds = has_embeddings(self.settings.lora.target_modules)
            return dict(sorted(get_peft_model_state_dict(self.module, save_embedding_layers=embeds).items()))
        state = self.module.state_dict()
        return {name: state[name] for name in sorted(state) if name not in self._tied}

    def published(self) -> dict[str, Tensor]:
        """`weights` in the published type; copies are in main memory, so a GPU has one of a single tensor at a time."""
        return {
            name: value if (own := self.as_published(value)) is value else own.cpu()
            for name, value in self.weights().items()
        }

    def weights_bytes(self) -> bytes:
        """`published` as one safetensors file; equal weights give equal bytes."""
        return to_bytes(self.published())

    @property
    def publishes_exactly(self) -> bool:
        """Whether `published` are the weights that are trained, and not rounded ones."""
        return all(one.dtype == self._published_dtype for one in self.weights().values() if one.is_floating_point())

    def as_published(self, value: Tensor) -> Tensor:
        """A tensor in the published type."""
        return value.to(self._published_dtype) if value.is_floating_point() else value

    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """Take over weights by name. Raises ModelError if names or shapes are not this model's."""
        self._assign(self._fitting(tensors), tensors)

    def take_weights(self) -> None:
        """Take over the weights that rank 0 loads. To be called in all other processes; here there are none."""
        raise NotImplementedError

    def check_weights(self, tensors: dict[str, Tensor]) -> None:
        """Raises ModelError if names or shapes are not this model's."""
        self._fitting(tensors)

    def _fitting(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """This model's own tensors, which others fit."""
        own = self.weights()
        if own.keys() != tensors.keys():
            odd = sorted(own.keys() ^ tensors.keys())[:3]
            raise ModelError(
                f"weights do not fit model {self.settings.path} ({self.weights_format}), such as "
                f"{', '.join(odd)}; give the model.path and model.lora that they were trained with"
            )
        for name, value in own.items():
            _check_shape(name, tensors[name], value, self.num_token_ids)
        return own

    def _assign(self, own: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in own.items() if not self.settings.lora else ():
                value.copy_(tensors[name])
            if self.settings.lora:
                from peft import set_peft_model_state_dict

                set_peft_model_state_dict(self.module, tensors)

    def compute_as(self, revision: int) -> None:
        """Compute log-probabilities by the rules of a job's `revision`."""
        self.selects_logprobs &= revision >= SELECTS_LOGPROBS_SINCE
        self.may_fuse = self.settings.fused_kernels and revision >= FUSES_KERNELS_SINCE
        self.copies_keys = revision < SHARES_KEYS_SINCE

    def use_dropout(self, enabled: bool) -> None:
        """Apply the model's and the adapters' dropout in forwards from now on, or not."""
        self.module.train(enabled)
        if self.settings.gradient_checkpointing:
            for module in self.module.modules():
                if isinstance(module, GradientCheckpointingLayer):
                    module.training = True  # transformers asks a layer for it, and computes so only then

    @property
    def _head_dtype(self) -> torch.dtype | None:
        """None: the hidden states' own."""
        if self.settings.fp32_head:
            return torch.float32
        return None if self.compute_dtype == torch.float32 else self.compute_dtype

    def shares_prefixes(self, longest: int) -> bool:
        """Whether rows of up to `longest` tokens may be computed as a prefix tree. Logs once why they may not be."""
        why = "" if self.selects_logprobs and longest <= self._longest_shared else self._why_apart
        if self._has_dropout and self.module.training:
            why = "each row has dropout of its own"
        if why and why != self._logged:
            logger.warning("model=%s computes common prefixes of rows once a row: %s", self.settings.path, why)
            self._logged = why
        return not why

    def frozen_copy(self, dtype: torch.dtype | None = None) -> "PolicyModel":
        """The same model as it is now, without gradients and dropout, held and computed in `dtype` if that is given."""
        frozen = copy.copy(self)
        frozen.module = frozen_copy(self.module, dtype or torch.float32)
        frozen.compute_dtype = dtype or self.compute_dtype
        if self.settings.compile:  # a copy is not
            compile_layers(inner(frozen.module), self.settings.path)
        return frozen

    def completion_terms(
        self, batch: MicroBatch, *, temperature: float, entropy_needs_grad: bool, entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy (N,) of the N tokens on the mask, row by row, under the current policy.

        Padding is on the right, so causal attention needs no mask. Entropies that are not asked for are 0.
        """
        if not self.selects_logprobs:
            return self._terms_by_logits(batch, temperature, entropy_needs_grad, entropy)
        with torch.autocast(self.device.type, self.compute_dtype, enabled=self.compute_dtype != torch.float32):
            decoder = inner(self.module).get_decoder()
            if batch.tree is None:
                hidden_B_T_D = decoder(input_ids=batch.token_ids, use_cache=False).last_hidden_state
                at_N = batch.mask.flatten().nonzero().flatten() if batch.at_N is None else batch.at_N
                hidden_N_D = hidden_B_T_D.flatten(0, 1)[at_N - 1]
            else:
                hidden = hidden_states(decoder, batch.tree, copies_keys=self.copies_keys)
                hidden_N_D = functional.embedding(batch.tree.sources_M, hidden)
        head = inner(self.module).get_output_embeddings()
        logprobs_N, entropies_N = selected_logprobs(
            hidden_N_D,
            Head(head.weight, head.bias),
            batch.on_mask(batch.token_ids),
            temperature,
            batch.kept,
            compute_dtype=self._head_dtype,
            entropy=entropy,
            entropy_needs_grad=entropy_needs_grad,
            fused=self.may_fuse and fuses(self.device, self._head_dtype or hidden_N_D.dtype),
        )
        return logprobs_N, torch.zeros_like(logprobs_N) if entropies_N is None else entropies_N

    def _terms_by_logits(
        self, batch: MicroBatch, temperature: float, entropy_needs_grad: bool, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """The same from the model's own logits, of columns that some row predicts a completion token from."""
        columns_K, at_N = batch.targets
        with torch.autocast(self.device.type, self.compute_dtype, enabled=self.compute_dtype != torch.float32):
            logits_B_K_V = self.module(input_ids=batch.token_ids, use_cache=False, logits_to_keep=columns_K).logits
        logits_N_V = logits_B_K_V.flatten(0, 1)[at_N].float() / temperature
        targets_N = batch.token_ids[:, 1:][:, columns_K].flatten()[at_N]
        if batch.kept is not None:
            kept_offsets(batch.kept, targets_N, len(targets_N))
            logits_N_V = only_kept(logits_N_V, batch.kept)
        log_softmax_N_V = functional.log_softmax(logits_N_V, dim=-1)
        logprobs_N = -functional.nll_loss(log_softmax_N_V, targets_N, reduction="none")
        if not entropy:
            return logprobs_N, torch.zeros_like(logprobs_N)
        with torch.set_grad_enabled(entropy_needs_grad):
            entropies_N = -(log_softmax_N_V.exp() * log_softmax_N_V).sum(dim=-1)
        return logprobs_N, entropies_N


def make_deterministic(threads: int | None, *, deterministic: bool = True) -> None:
    """Fix what decides bits: thread count and deterministic algorithms. Call it in the thread that trains.

    `deterministic` off: fix only the thread count, and use the fastest algorithms. In both cases the process's new
    tensors are no longer filled with NaNs, which took 5 % of a step on an H200: nothing is read before it is written.
    """
    choose_cublas_workspace(os.environ)  # another job of this process may be deterministic
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if threads is not None:
        torch.set_num_threads(threads)


def published_sha256(model: PolicyModel) -> str:
    """sha256 (hex) of the weights as they are published."""
    digest = hashlib.sha256()
    for piece in published_pieces(model.published()):
        digest.update(piece)
    return digest.hexdigest()


def _check_shape(name: str, source: Tensor, target: Tensor, num_token_ids: int) -> None:
    """Raises ModelError naming both shapes; where only the vocabulary differs, it names that."""
    if source.shape == target.shape:
        return
    what = f"weights do not fit: {name} is {tuple(source.shape)}, the model's {tuple(target.shape)}"
    if len(target) == num_token_ids and source.shape[1:] == target.shape[1:]:
        what += f": a vocabulary of {len(source)} tokens, and one of {num_token_ids}"
    raise ModelError(f"{what}; give the model.path that they were trained with")


def _as_json(value: Any) -> JsonValue:
    if isinstance(value, (set, frozenset, tuple, list)):
        items: list[Any] = list(value)
        return [_as_json(item) for item in (sorted(items) if isinstance(value, (set, frozenset)) else items)]
    if isinstance(value, dict):
        return {str(name): _as_json(item) for name, item in value.items()}
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(getattr(value, "value", value))


class Reference:
    """Weights that stay. Full weights are a copy of the model; adapters are put in place of the policy's for a forward.

    It computes on the policy's device and without dropout, in the policy's type unless `model.reference_dtype` says
    another. Of several processes each has the shards that it has of the policy, and all must compute together.
    """

    def __init__(self, policy: PolicyModel, weights: bytes, what: str, command: str = "take_base") -> None:
        """`weights`: as published; `what` names them. The policy stays as it is. Raises ModelError.

        Of several processes only rank 0 has the weights; `command`: what it tells the others to make theirs by.
        """
        tensors = from_bytes(weights, what) if policy.ranks.index == 0 else None
        if tensors is not None:
            policy.check_weights(tensors)  # before others wait for them
        self._policy = policy
        self._adapters: list[Tensor] | None = None
        what = f"the copy of model {policy.settings.path} that the loss compares with"
        with policy.ranks.together(command), within_memory(what, WITHOUT_COPY, alone=policy.ranks.num == 1):
            if policy.settings.lora is None:
                own_type = policy.settings.reference_dtype
                self._policy = policy.frozen_copy(None if own_type == "auto" else getattr(torch, own_type))
                _load(self._policy, tensors)
            else:
                own = _values(policy)
                _load(policy, tensors)
                self._adapters = _values(policy)
                _put(policy, own)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, *, temperature: float) -> Tensor:
        """Log-probabilities (N,) of the N tokens on the mask, row by row."""
        if self._adapters is None:
            return self._terms(batch, temperature)
        own = _values(self._policy)
        was_training = self._policy.module.training
        _put(self._policy, self._adapters)
        self._policy.module.eval()
        try:
            return self._terms(batch, temperature)
        finally:
            self._policy.use_dropout(was_training)
            _put(self._policy, own)

    def _terms(self, batch: MicroBatch, temperature: float) -> Tensor:
        logprobs_N, _ = self._policy.completion_terms(
            batch, temperature=temperature, entropy_needs_grad=False, entropy=False
        )
        return logprobs_N


def _load(policy: PolicyModel, tensors: dict[str, Tensor] | None) -> None:
    """None: rank 0 has them."""
    policy.take_weights() if tensors is None else policy.load_weights(tensors)


def _values(policy: PolicyModel) -> list[Tensor]:
    return [parameter.detach().clone() for _, parameter in policy.trainable()]


@torch.no_grad()
def _put(policy: PolicyModel, values: list[Tensor]) -> None:
    for (_, parameter), value in zip(policy.trainable(), values, strict=True):
        parameter.copy_(value)
