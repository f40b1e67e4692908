"""Versions of the libraries that can change a result: what a run records, and a replay compares."""

import platform
from importlib import metadata

LIBRARIES = (
    *("rollstream", "torch", "transformers", "peft", "safetensors", "numpy", "faust-streaming", "aiokafka"),
    *("triton", "bitsandbytes"),
)
"""Those that are not installed are left out."""


def library_versions() -> dict[str, str]:
    """Versions of software that can change a result."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
