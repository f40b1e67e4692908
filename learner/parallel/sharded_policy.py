"""The policy over several processes: FSDP2 shards of its parameters, gathered for each layer while it computes.

Shards are kept in files of torch.distributed.checkpoint, to be read by any number of processes. The files are
safetensors: reading them runs no code, as reading torch's own format would.
"""

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rollstream.eventlog.files import HashingFile
from rollstream.learner.model.loading import hold_parameters_in
from rollstream.learner.model.micro_batch import MicroBatch
from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.model.ranks import Ranks, whole
from rollstream.learner.parallel.process_ranks import ProcessRanks
from rollstream.schemas.errors import ModelError
from rollstream.schemas.settings import ModelSettings

T = TypeVar("T")


class ShardedPolicy(PolicyModel):
    """A policy of which every process has a part. What all of them do together, each of them must be asked for."""

    def __init__(self, settings: ModelSettings, ranks: ProcessRanks, *, seed: int, path: str | None = None) -> None:
        """Like PolicyModel, but only rank 0 loads the weights. The others receive them layer by layer, and keep shards.

        To be called within `ranks.together`, because no process continues if one fails. A process whose folder's
        configuration would give another model than rank 0's loads its weights, too. A base model in 4 bits is loaded by
        all, and its 4-bit weights stay whole.
        """
        load, has_weights = partial(self._load, settings, ranks, seed, path), settings.quantization is not None
        first = partial(load, has_weights=has_weights or ranks.index == 0)
        found = [orjson.loads(one) for one in ranks.agreed(first, "load")]
        if has_weights and len({one["base_sha256"] for one in found}) > 1:
            raise ModelError(
                f"model {settings.path}: processes find different weights, and each loads those in 4 bits itself; give "
                "all of them the same files"
            )
        is_alike = found[ranks.index]["parameters"] == found[0]["parameters"]
        ranks.agreed(lambda: b"" if is_alike else load(has_weights=True), "load")
        self.ranks = ranks
        self._path = path
        self.selects_logprobs, self._why_apart = found[0]["selects_logprobs"], found[0]["why_apart"]
        self._longest_shared = float.fromhex(found[0]["longest_shared"])
        with ranks.collective():
            self._shard(ranks)

    def _load(
        self, settings: ModelSettings, ranks: ProcessRanks, seed: int, path: str | None, *, has_weights: bool
    ) -> bytes:
        """The model of this process, whole or without weights, and its description."""
        device = ranks.device(settings.device, f"model {settings.path}: device")
        super().__init__(settings.model_copy(update={"device": device}), seed=seed, path=path, has_weights=has_weights)
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return orjson.dumps(
            {
                "parameters": [[name, list(value.shape), str(value.dtype)] for name, value in named],
                "selects_logprobs": self.selects_logprobs,
                "longest_shared": self._longest_shared.hex(),
                "why_apart": self._why_apart,
                "base_sha256": self.base_sha256,
            }
        )

    def _shard(self, ranks: ProcessRanks) -> None:
        """Layer by layer, then what is left: embeddings, norm and head, which stay whole from forward to backward.

        A layer's forward pass that is compiled does not contain what gathers it: torch runs that before and after it.
        """
        of_layer, of_rest = gathered_as(self.compute_dtype, fp32_head=self.settings.fp32_head)
        kept_whole = in_4_bits(self.module)
        shard: Callable[..., Any] = partial(fully_shard, mesh=ranks.mesh(self.device), ignored_params=kept_whole)
        for layer in [part for part in self.module.modules() if isinstance(part, GradientCheckpointingLayer)]:
            take_from_first(layer, self.device, kept_whole)
            shard(layer, mp_policy=of_layer)
        take_from_first(self.module, self.device, kept_whole)
        shard(self.module, mp_policy=of_rest, reshard_after_forward=False)
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # losses have been divided by what all processes have
                part.set_force_sum_reduction_for_comms(enable=True)
        self.module.with_parameters = _called
        register_fsdp_forward_method(self.module, "with_parameters")

    def completion_terms(
        self, batch: MicroBatch, *, temperature: float, entropy_needs_grad: bool, entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        compute = partial(
            super().completion_terms,
            batch,
            temperature=temperature,
            entropy_needs_grad=entropy_needs_grad,
            entropy=entropy,
        )
        try:
            return self.module.with_parameters(compute) if self.selects_logprobs else compute()
        finally:
            if not torch.is_grad_enabled():  # no backward pass lets go of what stayed gathered, which is soon outdated
                self.module.reshard()

    def frozen_copy(self, dtype: torch.dtype | None = None) -> "ShardedPolicy":
        """The model of the folder once more, in shards, without gradients and dropout: its weights must be loaded."""
        assert isinstance(self.ranks, ProcessRanks)
        with torch.random.fork_rng(devices=[]):
            frozen = ShardedPolicy(self.settings, self.ranks, seed=0, path=self._path)
        frozen.selects_logprobs, frozen.may_fuse = self.selects_logprobs, self.may_fuse
        frozen.copies_keys = self.copies_keys
        frozen.module.eval().requires_grad_(requires_grad=False)
        if dtype is not None:
            hold_parameters_in(frozen.module, dtype)
            frozen.compute_dtype = dtype
        return frozen

    def published(self) -> dict[str, Tensor]:
        """Weights as on one process, in rank 0; empty in the others, which contribute their shards of one tensor at a
        time.
        """
        with self.ranks.together("weights"), self.ranks.collective():
            found = {name: self._published(value) for name, value in self.weights().items()}
        return found if self.ranks.index == 0 else {}

    def _published(self, value: Tensor) -> Tensor:
        """A tensor whole, in main memory; an empty one where nobody asks for it."""
        gathered = self.as_published(whole(value.detach()))
        return gathered.cpu() if self.ranks.index == 0 else gathered.new_empty(0)

    def take_weights(self) -> None:
        """Take over the weights that rank 0 loads. To be called in all other processes."""
        own = self.weights()
        self._assign(own, {})

    def _assign(self, own: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        """`tensors`: whole, where those of rank 0 count, or shards; none in a process that takes those of rank 0."""
        with torch.no_grad(), self.ranks.together("take_weights"), self.ranks.collective():
            for name, value in own.items():
                given = tensors[name] if tensors else torch.empty(value.shape, dtype=value.dtype)
                value.copy_(sharded_like(value, given))
                if not isinstance(value, DTensor):
                    _broadcast(value)


def gathered_as(compute_dtype: torch.dtype, *, fp32_head: bool) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """The types that parameters are gathered in: those of a layer, and those of embeddings, norm and head.

    With `fp32_head` what is left of the layers stays as it is held, and of a layer what is not a matrix: its scales are
    then those of the sharded parameters, unrounded, beside hidden states in float32.
    """
    held = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    if compute_dtype == torch.float32:
        return held, held
    low = replace(held, param_dtype=compute_dtype)
    return (replace(low, param_dtype_override_fn=_unless_matrix), held) if fp32_head else (low, low)


def _unless_matrix(parameter: torch.nn.Parameter) -> torch.dtype | None:
    return None if parameter.dim() > 1 else parameter.dtype


def in_4_bits(module: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Parameters that bitsandbytes holds in 4 bits: packed, with what decodes them in an attribute, which FSDP would
    lose.
    """
    return {one for one in module.parameters() if hasattr(one, "quant_state")}


@torch.no_grad()
def take_from_first(
    part: torch.nn.Module, device: torch.device, apart: Collection[torch.nn.Parameter] = frozenset()
) -> None:
    """Give all processes what rank 0 has of a part that is not in shards yet; to be called in all of them.

    `apart`: parameters that each has already.
    """
    made: dict[Tensor, Tensor] = {}
    for module in part.modules():
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if value is not None and value.is_meta:
                    values[name] = made.setdefault(value, _empty_like(value, device))  # pyright: ignore[reportArgumentType]
    for value in [*part.parameters(), *part.buffers()]:
        if not isinstance(value, DTensor) and value not in apart:
            _broadcast(value)


def _broadcast(value: Tensor) -> None:
    """Give all processes the bytes that rank 0 has of a tensor, whatever their type."""
    if value.numel():
        dist.broadcast(value.detach().reshape(-1).view(torch.uint8), 0)


def _empty_like(value: Tensor, device: torch.device) -> Tensor:
    found = torch.empty(value.shape, dtype=value.dtype, device=device)
    return torch.nn.Parameter(found, value.requires_grad) if isinstance(value, torch.nn.Parameter) else found


def sharded_like(target: Tensor, source: Tensor) -> Tensor:
    """A tensor in shards as `target` is; as it is if it is so already, or if `target` is whole."""
    if isinstance(source, DTensor) or not isinstance(target, DTensor):
        return source
    on_device = source.to(target.device, target.dtype)
    return distribute_tensor(on_device, target.device_mesh, target.placements)


def _called(work: Callable[[], T]) -> T:
    return work()


class HashingFiles(FileSystem):
    """The file system that torch writes shards to; it hashes them while they are written."""

    def __init__(self) -> None:
        self.sha256: dict[str, str] = {}
        """Sha256 of each file of this process, by name."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Create a stream like FileSystem, which also hashes the written bytes."""
        with super().create_stream(path, mode) as stream:
            hashing = HashingFile(stream)  # pyright: ignore[reportArgumentType]
            yield hashing
        if mode == "wb":
            self.sha256[Path(path).name] = hashing.sha256


def write_shards(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, str]:
    """Write what each process has into one folder, which all of them see. All must call it.

    Gives the sha256 of each file that this process wrote, by name. Raises OSError.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    writer.fs = files = HashingFiles()
    try:
        state_dict_saver.save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        first = _first(error)
        raise OSError(
            getattr(first, "errno", None), f"shards cannot be written to {folder}: {first}; free space there"
        ) from error
    return files.sha256


def checkpointed(
    folder: Path, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor] | None, ranks: Ranks
) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint in a folder: `tensors`, or, if it has none, its shards. All processes must call it.

    `like`: as for `empty_shards`; none in a process that is alone. Raises OSError.
    """
    found = tensors or empty_shards(folder, like)
    shapes = orjson.dumps({name: [*value.shape] for name, value in sorted(found.items())})
    if set(ranks.gathered(shapes)) != {shapes}:  # whoever cannot read it tells the others here
        raise OSError(f"processes find different tensors in {folder}; let all of them see the same folder")
    if not tensors:
        read_shards(folder, found, alone=like is None)
        return found
    return tensors if like is None else {name: sharded_like(like.get(name, one), one) for name, one in tensors.items()}


def empty_shards(folder: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Tensors for `read_shards` to fill, by name: those of a name in `like` are in shards as these are, all others are
    whole. Raises OSError.
    """
    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, ValueError, LookupError) as error:
        raise _unreadable(folder, error) from error
    return {name: _empty(found, (like or {}).get(name)) for name, found in sorted(metadata.items())}


def read_shards(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    """Read into `empty_shards` what `write_shards` has written, with the same number of processes or another.

    Unless `alone`, all processes must call it. Raises OSError.
    """
    reader = HuggingFaceStorageReader(str(folder))
    with warnings.catch_warnings():  # of no process group, where this process alone reads
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            state_dict_loader.load(dict(tensors), storage_reader=reader, no_dist=alone)
        except CheckpointException as error:
            raise _unreadable(folder, _first(error)) from error


def _unreadable(folder: Path, error: BaseException) -> OSError:
    return OSError(f"shards of {folder} cannot be read: {error}; restore the folder")


def _first(error: CheckpointException) -> BaseException:
    """The failure of one of the processes."""
    return next(iter(error.failures.values()))[0]


def _empty(found: Any, like: Tensor | None) -> Tensor:
    if isinstance(like, DTensor) and like.shape == found.size:
        return torch.zeros_like(like, dtype=found.properties.dtype)
    return torch.zeros(found.size, dtype=found.properties.dtype)
