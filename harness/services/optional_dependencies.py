"""Libraries that only an extra installs, and the message when one of them is missing."""

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rollstream.schemas.errors import ConfigError

if TYPE_CHECKING:  # the command line imports this module, and all settings take five times as long as the rest of it
    from rollstream.schemas.config import AdapterSection

OF_LEARNER = ("torch", "transformers", "peft", "safetensors")
"""Libraries of rollout engine and learner; log, processors and metrics do not need them."""
OF_QUANTIZED = "bitsandbytes"
"""Package for models in 4 bits and optimizers in 8."""

UNUSED = {"sklearn": "transformers.generation.candidate_generator", "scipy": "transformers.loss.loss_utils"}
"""Libraries and the module of transformers that would import each."""


def check_learner() -> None:
    """Raises ConfigError naming a library of the extra `learner` that is not installed."""
    for library in OF_LEARNER:
        if find_spec(library) is None:
            raise ConfigError(_remedy(library))


def check_quantized(adapter: "AdapterSection", path_of: Callable[[str], str]) -> None:
    """Raises ConfigError for a setting that needs the extra `quantized`, if it is not installed.

    `path_of`: the path of a key of `adapter` in the file.
    """
    optimizers = {"optimizer.kind": adapter.optimizer}
    if adapter.warm_start is not None:
        optimizers["warm_start.optimizer.kind"] = adapter.warm_start.optimizer
    named = {key: one.kind for key, one in optimizers.items() if one.kind == "adamw_8bit"}
    if adapter.model.quantization is not None:
        named["model.quantization"] = adapter.model.quantization
    if named and find_spec(OF_QUANTIZED) is None:
        key, value = next(iter(named.items()))
        raise ConfigError(f"{path_of(key)}: {value}: {_remedy(OF_QUANTIZED)}")


def skip_unused_libraries() -> None:
    """Load the modules of transformers that use `UNUSED` as they are without it, unless it is loaded already.

    Where another package installed scikit-learn or scipy, they import it for assisted generation and for losses of
    object detection, which nothing here uses: a sixth of a learner's start. Users' code still imports both, and
    transformers still finds them.
    """
    unused = {library: module for library, module in UNUSED.items() if library not in sys.modules}
    if not unused or find_spec("transformers") is None:
        return
    from transformers import utils

    names: dict[str, Any] = utils.__dict__
    before = {name: names[name] for name in (f"is_{library}_available" for library in unused)}
    names.update(dict.fromkeys(before, lambda: False))
    try:
        for module in unused.values():
            importlib.import_module(module)
    finally:
        names.update(before)
    for name, module in [*sys.modules.items()]:
        if name.startswith("transformers.loss."):
            vars(module).setdefault("linear_sum_assignment", _linear_sum_assignment)


def _linear_sum_assignment(*given: Any, **options: Any) -> Any:
    """The function of scipy that transformers' losses of object detection use, for users' code that computes one."""
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(*given, **options)


def missing(error: ModuleNotFoundError) -> str | None:
    """The remedy for an import that failed for want of an extra, None if it is not about an extra."""
    library = (error.name or "").split(".", 1)[0]
    return _remedy(library) if library in (*OF_LEARNER, OF_QUANTIZED) else None


def _remedy(library: str) -> str:
    if library == OF_QUANTIZED:
        return f"{library} is not installed: pip install '.[learner,quantized]' in rollstream's checkout"
    return f"{library} is not installed, which models need: pip install '.[learner]' in rollstream's checkout"
