"""Counts what would make the host wait for a GPU, in a computation on the CPU."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {
    torch.ops.aten._local_scalar_dense: "reads a number",
    torch.ops.aten.nonzero: "depends on values",
    torch.ops.aten.masked_select: "depends on values",
    torch.ops.aten.unique_dim: "depends on values",
    torch.ops.aten._unique2: "depends on values",
    torch.ops.aten.equal: "reads a number",
}
_FUNCTIONS = {
    torch.Tensor.tolist: "reads a list",
    torch.Tensor.cpu: "reads a list",
    torch.tensor: "copies Python numbers",
    torch.as_tensor: "copies Python numbers",
}
_INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


class _Operators(TorchDispatchMode):
    """Numbers that are read, and shapes that depend on values."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found
        self.is_counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket
        what = _READS.get(name, "")
        if name in _INDEXED and any(one is not None and one.dtype == torch.bool for one in args[1]):
            what = "depends on values"
        if name is torch.ops.aten.repeat_interleave and (kwargs or {}).get("output_size") is None:
            what = "depends on values"
        if what and self.is_counting:
            self.found[what] += 1
        return func(*args, **(kwargs or {}))


class _Lists(TorchFunctionMode):
    """Tensors that are read whole or made of Python numbers, for which there are no operators on the CPU."""

    def __init__(self, operators: _Operators) -> None:
        super().__init__()
        self.operators = operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FUNCTIONS and self.operators.is_counting:
            self.operators.found[_FUNCTIONS[func]] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_waits(optimizer: torch.optim.Optimizer | None = None) -> Iterator[Counter[str]]:
    """Waits within the context, counted by kind. The steps of `optimizer` are left out: its own counters stay in main
    memory.
    """
    found: Counter[str] = Counter()
    with _Operators(found) as operators, _Lists(operators):

        def count(is_counting: bool) -> Any:
            def hook(*_: Any) -> None:
                operators.is_counting = is_counting

            return hook

        hooks = []
        if optimizer is not None:
            hooks = [optimizer.register_step_pre_hook(count(False)), optimizer.register_step_post_hook(count(True))]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()
