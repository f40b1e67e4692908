"""Log-probabilities and entropies of chosen tokens with all gradients, for comparison with exact ones."""

import torch
from torch import Tensor

from rollstream.learner.model.logprobs import Head, selected_logprobs

TEMPERATURE = 0.7
OF_ENTROPY = 0.3
"""Weight of the entropies in the sum that is differentiated."""
Shape = tuple[int, int, int]
"""Tokens, width and vocabulary."""


def given(shape: Shape, dtype: torch.dtype, *, bias: bool, device: str = "cpu") -> tuple[list[Tensor], Tensor]:
    """Hidden states, head and bias; and targets."""
    num_tokens, width, vocabulary = shape
    generator = torch.Generator().manual_seed(3)
    sizes = [(num_tokens, width), (vocabulary, width), *([(vocabulary,)] if bias else [])]
    operands = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
    return operands, torch.randint(vocabulary, (num_tokens,), generator=generator).to(device)


def factors_of(targets: Tensor) -> Tensor:
    """Gradients of the log-probabilities."""
    return torch.arange(1.0, len(targets) + 1, device=targets.device)


def computed(operands: list[Tensor], targets: Tensor, *, fused: bool) -> list[Tensor]:
    """Log-probabilities, entropies, and the gradients of the operands."""
    own = [one.detach().clone().requires_grad_() for one in operands]
    head = Head(own[1], own[2] if len(own) == 3 else None)
    one, entropy = selected_logprobs(own[0], head, targets, TEMPERATURE, entropy_needs_grad=True, fused=fused)
    assert entropy is not None
    factors = factors_of(targets)
    total = (one * factors + OF_ENTROPY * factors * entropy).sum()
    return [one.detach(), entropy.detach(), *torch.autograd.grad(total, own)]


def by_autograd(operands: list[Tensor], targets: Tensor) -> list[Tensor]:
    """The same by torch's own softmax of all logits, in float64."""
    own = [one.detach().double().requires_grad_() for one in operands]
    logits = torch.nn.functional.linear(*own) / TEMPERATURE
    log_softmax = logits.log_softmax(-1)
    one = log_softmax.gather(1, targets[:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    factors = factors_of(targets)
    total = (one * factors + OF_ENTROPY * factors * entropy).sum()
    return [one.detach(), entropy.detach(), *torch.autograd.grad(total, own)]


def error(found: Tensor, wanted: Tensor) -> float:
    """The largest one, as a part of the largest value."""
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())
