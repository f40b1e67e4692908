"""rollstream's own components, as the entry point `rollstream.components` names them: environments by their modules."""

import importlib

MODULES = (
    "rollstream.producers.environments.arithmetic",
    "rollstream.producers.environments.guess_number",
    "rollstream.producers.environments.recorded",
    "rollstream.producers.environments.remote_workflow",
    "rollstream.producers.environments.tic_tac_toe",
)


def load() -> None:
    """Import what registers itself."""
    for module in MODULES:
        importlib.import_module(module)
