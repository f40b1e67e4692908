"""The policy over several processes: FSDP2 shards of its parameters, gathered for each layer while it computes."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rollstream.learner.model.collate import MicroBatch
from rollstream.learner.model.policy import PolicyModel, to_bytes
from rollstream.learner.model.ranks import whole
from rollstream.learner.parallel.process_ranks import ProcessRanks
from rollstream.schemas.settings import ModelSettings

T = TypeVar("T")


class ShardedPolicy(PolicyModel):
    """A policy of which every process has a part. What all of them do together, each of them must be asked for."""

    def __init__(self, settings: ModelSettings, ranks: ProcessRanks, *, seed: int, path: str | None = None) -> None:
        """As PolicyModel: every process loads the model whole, and then keeps its shards. Raises ConfigError too."""
        device = ranks.device(settings.device, f"model {settings.path}: device")
        super().__init__(settings.model_copy(update={"device": device}), seed=seed, path=path)
        self.ranks = ranks
        self._shard(ranks)

    def _shard(self, ranks: ProcessRanks) -> None:
        """Layer by layer, then what is left: embeddings, norm and head, which stay whole from forward to backward."""
        is_low = self.compute_dtype != torch.float32 and not self.settings.fp32_head
        policy = MixedPrecisionPolicy(
            param_dtype=self.compute_dtype if is_low else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        shard: Callable[..., Any] = partial(fully_shard, mesh=ranks.mesh(self.device), mp_policy=policy)
        for layer in [part for part in self.module.modules() if isinstance(part, GradientCheckpointingLayer)]:
            shard(layer)
        shard(self.module, reshard_after_forward=False)
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # losses have been divided by what all processes have
                part.set_force_sum_reduction_for_comms(enable=True)
        self.module.with_parameters = _called
        register_fsdp_forward_method(self.module, "with_parameters")

    def completion_terms(
        self, batch: MicroBatch, *, temperature: float, entropy_needs_grad: bool
    ) -> tuple[Tensor, Tensor]:
        compute = partial(
            super().completion_terms, batch, temperature=temperature, entropy_needs_grad=entropy_needs_grad
        )
        return self.module.with_parameters(compute) if self.selects_logprobs else compute()

    def weights_bytes(self) -> bytes:
        """As on one process, in rank 0; nothing in the others, which give their shards of a tensor at a time."""
        found = {name: self._published(value) for name, value in self.weights().items()}
        return to_bytes(found) if self.ranks.index == 0 else b""

    def _published(self, value: Tensor) -> Tensor:
        """A tensor whole, in main memory; an empty one where nobody asks for it."""
        gathered = self.as_published(whole(value.detach()))
        return gathered.cpu() if self.ranks.index == 0 else gathered.new_empty(0)

    def _assign(self, own: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        """`tensors`: whole, where those of rank 0 count, or shards."""
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(sharded_like(value, tensors[name]))


def sharded_like(target: Tensor, source: Tensor) -> Tensor:
    """A tensor in shards as `target` is; as it is if it is so already, or if `target` is whole."""
    if isinstance(source, DTensor) or not isinstance(target, DTensor):
        return source
    on_device = source.to(target.device, target.dtype)
    return distribute_tensor(on_device, target.device_mesh, target.placements)


def _called(work: Callable[[], T]) -> T:
    return work()
