"""Repairs what `nat finetune` 1.9 hands to components, and names what it needs and does not install. Imports no NAT.

Its configuration holds itself: `finetuning.run_configuration.config_file` is the configuration whose `finetuning` that
is. Whatever prints or dumps it, and NAT's own evaluation does, never ends; so nothing here ever shows it. Its options
`--dataset` and `--validation_dataset` are paths where its evaluation takes texts only.
"""

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel

from rollstream.schemas.errors import ConfigError

PACKAGES = {
    "nat.plugins.eval": "'nvidia-nat-eval==1.9.*'",
    "tqdm": "tqdm",
    "langchain_core": "langchain-core",
}
"""What NAT's `run_eval()` imports: module and what pip calls it. It declares neither tqdm nor langchain-core."""
PROFILER = {"nat.plugins.profiler": "'nvidia-nat-profiler==1.9.*'"}
"""Without it NAT records no step of a language model, and says nothing of that."""


def repair(finetune: Any) -> None:
    """Cut the cycle and turn dataset paths into texts, in place. Does nothing to what is whole; may be called again."""
    run = finetune.run_configuration
    if run is None:
        return
    update: dict[str, Any] = {
        key: str(getattr(run, key)) for key in ("dataset", "validation_dataset") if getattr(run, key) is not None
    }
    file = run.config_file
    inner: Any = getattr(file, "finetuning", None)
    if isinstance(file, BaseModel) and getattr(inner, "run_configuration", None) is not None:
        plain = inner.model_copy(update={"run_configuration": None})
        update["config_file"] = file.model_copy(update={"finetuning": plain})
    if any(getattr(run, key) is not value for key, value in update.items()):
        finetune.run_configuration = run.model_copy(update=update)


def check_packages(finetune: Any, is_there: Callable[[str], bool] | None = None) -> None:
    """Raises ConfigError with the pip command if NAT's evaluation of this configuration would lack a package."""
    file = None if finetune.run_configuration is None else finetune.run_configuration.config_file
    needed = PACKAGES | (PROFILER if getattr(file, "llms", None) else {})
    missing = _missing(needed, is_there or _is_there)
    if missing:
        names = ", ".join(missing)
        raise ConfigError(
            f"NAT's evaluation needs {names}, which it does not install: "
            f"pip install {' '.join(needed[name] for name in missing)}"
        )


def _missing(modules: Iterable[str], is_there: Callable[[str], bool]) -> list[str]:
    return [name for name in modules if not is_there(name)]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
