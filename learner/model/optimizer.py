"""AdamW (in 32 or 8 bits) or Muon, and the learning-rate schedule over a job: a function of the step's index alone."""

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim._muon import (  # pyright: ignore[reportPrivateUsage]
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from rollstream.learner.model.ranks import whole
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.settings import OptimizerSettings

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]
Group = dict[str, Any]
"""A group of parameters: its `params`, and its own settings."""
STEP = "step"
"""Key of a parameter's state: its number of steps. It stays in main memory."""
CPU = torch.device("cpu")
MOMENTUM = "momentum_buffer"
"""Key of Muon's state."""
MOMENTS = ("exp_avg", "exp_avg_sq", MOMENTUM)
"""Keys of the states that are in shards as their parameter is, where several processes train."""


class MuonOfShards(torch.optim.Muon):
    """Muon of matrices in shards (DTensor): each update is that of the whole matrix, to the bits of torch's Muon.

    torch's own step of shards exchanges data 16 times a matrix, gives other bits, and fails at matrices of one row.
    Here each process gathers the momentum of a matrix once, in bfloat16, in which it is orthogonalised, and all compute
    the same.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step. All processes must take it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: DTensor, group: Group) -> None:
        gradient, state, momentum = parameter.grad, self.state[parameter], group["momentum"]
        assert gradient is not None
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(gradient)
        state[MOMENTUM].lerp_(gradient, 1 - momentum)
        ahead = gradient.lerp(state[MOMENTUM], momentum)  # Nesterov's, which is Muon's default
        gathered = whole(ahead.to(torch.bfloat16))
        update = _zeropower_via_newtonschulz(gathered, group["ns_coefficients"], group["ns_steps"], group["eps"])
        replicas = DTensor.from_local(update, parameter.device_mesh, [Replicate()], run_check=False)
        own = replicas.redistribute(placements=parameter.placements)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(own, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape))


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of layers (K. Jordan 2024), AdamW for everything else, with one memory.

    Muon's updates are scaled to the root mean square of AdamW's (arXiv 2502.16982), so both have one learning rate.
    """

    def __init__(self, matrices: Sequence[torch.nn.Parameter], rest: list[Group], settings: OptimizerSettings) -> None:
        """`rest`: parameter groups of AdamW, as `make_optimizer` makes them."""
        of_matrices = MuonOfShards if isinstance(matrices[0], DTensor) else torch.optim.Muon
        muon = of_matrices(
            matrices, lr=settings.learning_rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self._parts = [muon, *([_adamw(rest, settings)] if rest else [])]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if ("momentum" in group) == (part is muon)]

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of both."""
        for part in self._parts:
            part.step(closure)


def make_optimizer(parameters: NamedParameters, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer of these parameters; weight decay on matrices only. Raises ConfigError if it is not installed."""
    named = list(parameters)
    muon = [p for name, p in named if settings.kind == "muon" and p.ndim == 2 and _is_in_layer(name)]
    ids = set(map(id, muon))
    groups: list[Group] = [
        {"params": [p for _, p in named if p.ndim >= 2 and id(p) not in ids], "weight_decay": settings.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    rest = [group for group in groups if group["params"]]
    return MuonWithAdamW(muon, rest, settings) if muon else _adamw(rest, settings)


def _adamw(groups: list[Group], settings: OptimizerSettings) -> torch.optim.Optimizer:
    options: Group = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
    if settings.kind != "adamw_8bit":
        return torch.optim.AdamW(groups, **options)
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "optimizer.kind adamw_8bit needs bitsandbytes, which is not installed: pip install '.[learner,quantized]' "
            "in rollstream's checkout"
        )
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    return bitsandbytes.optim.AdamW8bit(groups, **options)


def _is_in_layer(name: str) -> bool:
    """Whether a parameter belongs to a numbered module: embeddings and heads do not."""
    return any(part.isdigit() for part in name.split("."))


def learning_rate(settings: OptimizerSettings, step: int, last_step: int) -> float:
    """Learning rate of optimizer step `step` (from 0).

    Rises linearly over `warmup_steps`, then falls to `final_fraction` at `last_step` (linear, cosine) or stays.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    done = min(1.0, (step - settings.warmup_steps) / max(1, last_step - settings.warmup_steps))
    share = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * (settings.final_fraction + (1 - settings.final_fraction) * share)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def steps_together(settings: OptimizerSettings) -> bool:
    """Whether several processes wait for each other within a step."""
    return settings.kind == "muon"


def take_step(optimizer: torch.optim.Optimizer, settings: OptimizerSettings) -> None:
    """One step. With `offload` the state is on the parameters' device for its time alone."""
    if settings.offload is None:
        optimizer.step()
        return
    devices = {parameter: parameter.device for parameter in optimizer.state}
    _move_state(optimizer, devices)
    optimizer.step()
    _move_state(optimizer, dict.fromkeys(optimizer.state, CPU))


def _move_state(optimizer: torch.optim.Optimizer, devices: Mapping[torch.Tensor, torch.device]) -> None:
    for parameter, state in optimizer.state.items():
        for kind, value in state.items():
            if isinstance(value, torch.Tensor) and kind != STEP:
                state[kind] = value.to(devices[parameter])


def state_tensors(optimizer: torch.optim.Optimizer, parameters: NamedParameters) -> dict[str, torch.Tensor]:
    """Everything the optimizer remembers, by parameter name and kind; empty before its first step."""
    return {
        f"{name}/{kind}": value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
        for name, parameter in parameters
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def sharding_of_state(parameters: NamedParameters) -> dict[str, torch.Tensor]:
    """The parameter whose sharding each moment of it follows, by the names of `state_tensors`."""
    return {f"{name}/{kind}": parameter.detach() for name, parameter in parameters for kind in MOMENTS}


def load_state_tensors(
    optimizer: torch.optim.Optimizer,
    parameters: NamedParameters,
    tensors: dict[str, torch.Tensor],
    offload: str | None = None,
) -> None:
    """Remember what `state_tensors` gave, and nothing else: on the parameters' device, or on that of `offload`."""
    optimizer.state.clear()
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, value in tensors.items():
        name, kind = full_name.rsplit("/", 1)
        by_parameter.setdefault(name, {})[kind] = value
    for name, parameter in parameters:
        state = by_parameter.get(name)
        if state is not None:
            optimizer.state[parameter] = {
                kind: _step(value) if kind == STEP else value.to(offload or parameter.device).clone()
                for kind, value in state.items()
            }


def _step(value: torch.Tensor) -> torch.Tensor | int:
    """torch's optimizers count steps in a tensor of float32, bitsandbytes' in an int."""
    return value.cpu().clone() if value.is_floating_point() else int(value)
