"""AdamW or Muon, and the learning-rate schedule over a job: a function of the step's index alone."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rollstream.schemas.settings import OptimizerSettings

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]
Group = dict[str, Any]
"""Of parameters: its `params`, and its own settings."""


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of layers (K. Jordan 2024), AdamW for everything else, with one memory.

    Muon's updates are scaled to the root mean square of AdamW's (arXiv 2502.16982), so both have one learning rate.
    """

    def __init__(self, matrices: Sequence[torch.nn.Parameter], rest: list[Group], settings: OptimizerSettings) -> None:
        """`rest`: parameter groups of AdamW, as `make_optimizer` makes them."""
        muon = torch.optim.Muon(
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
    """The optimizer of these parameters; weight decay on matrices only."""
    named = list(parameters)
    muon = [p for name, p in named if settings.kind == "muon" and p.ndim == 2 and _is_in_layer(name)]
    ids = set(map(id, muon))
    groups: list[Group] = [
        {"params": [p for _, p in named if p.ndim >= 2 and id(p) not in ids], "weight_decay": settings.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    rest = [group for group in groups if group["params"]]
    return MuonWithAdamW(muon, rest, settings) if muon else _adamw(rest, settings)


def _adamw(groups: list[Group], settings: OptimizerSettings) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps)


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


def state_tensors(optimizer: torch.optim.Optimizer, parameters: NamedParameters) -> dict[str, torch.Tensor]:
    """Everything the optimizer remembers, by parameter name and kind; empty before its first step."""
    return {
        f"{name}/{kind}": value.detach()
        for name, parameter in parameters
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_state_tensors(
    optimizer: torch.optim.Optimizer, parameters: NamedParameters, tensors: dict[str, torch.Tensor]
) -> None:
    """Remember what `state_tensors` gave, and nothing else."""
    optimizer.state.clear()
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, value in tensors.items():
        name, kind = full_name.rsplit("/", 1)
        by_parameter.setdefault(name, {})[kind] = value
    for name, parameter in parameters:
        state = by_parameter.get(name)
        if state is not None:
            optimizer.state[parameter] = {
                kind: value.cpu().clone() if kind == "step" else value.to(parameter.device).clone()
                for kind, value in state.items()
            }
