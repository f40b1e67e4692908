"""The resources that all parts of a process share: devices, CPU threads, garbage collector, and loading of models.

Torch is not imported here; whoever calls passes what it needs of it.
"""

import functools
import gc
import threading
from collections.abc import Callable, MutableMapping

from rollstream.schemas.errors import ModelError

MODEL_LOADING = threading.RLock()
"""Held while transformers builds a model: meanwhile it replaces methods of its classes and torch's default dtype in the
whole process. Two threads at once would leave them replaced, and later models without their tied weights.
"""


def device_of(device: str, num_gpus: int, where: str) -> str:
    """`cpu` or `cuda:N` of a setting. Raises ModelError, beginning with `where`, for a GPU that is not there."""
    if device == "cpu" or (device == "auto" and not num_gpus):
        return "cpu"
    index = int(device.partition(":")[2] or 0)
    if index < num_gpus:
        return f"cuda:{index}"
    found = {0: "there is no GPU", 1: "the only GPU is cuda:0"}.get(num_gpus, f"GPUs are cuda:0 to cuda:{num_gpus - 1}")
    raise ModelError(f"{where} is {device} and {found}; set {'another, ' if num_gpus else ''}auto or cpu")


def choose_cublas_workspace(env: MutableMapping[str, str]) -> None:
    """Set the variable without which torch refuses deterministic products on a GPU, unless it is set.

    To be called before the first product of a process: torch reads it then, and never again.
    """
    env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@functools.cache
def own_threads(get_num_threads: Callable[[], int]) -> int:
    """CPU threads that torch takes by itself: ask before a thread is given a number, which later ones begin with."""
    return get_num_threads()


def tune_gc(new_objects: int) -> None:
    """Leave the objects of start-up out of garbage collections, and begin one after a growth of `new_objects` objects.

    To be called once, when a process has imported and loaded what it needs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(new_objects, 10, 10)
