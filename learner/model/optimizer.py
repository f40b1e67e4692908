"""AdamW and its learning-rate schedule over a whole job. The schedule is a function of the step's index alone."""

import math
from collections.abc import Iterable

import torch

from rollstream.schemas.settings import OptimizerSettings

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


def make_optimizer(parameters: NamedParameters, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW over the parameters; weight decay on matrices only."""
    named = list(parameters)
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
    )


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
