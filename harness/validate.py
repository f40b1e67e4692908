"""`rollstream validate`: reads a configuration and makes the checks of `finetune` that need neither broker nor service.

Writes nothing. Leaves out what only the log or the workspace tells: versions of other runs, files and services in use.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from pydantic import JsonValue

from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import jobs_of, served_models
from rollstream.harness.runs.preflight import check_result
from rollstream.harness.runs.run_context import RunRequest, check_run
from rollstream.harness.services.workspace import Workspace
from rollstream.schemas.config import RunConfig
from rollstream.schemas.events.recorded import MADE_ELSEWHERE
from rollstream.schemas.settings import PlanSettings


def validate(
    path: Path,
    workspace: Path,
    overrides: Sequence[tuple[str, str]] = (),
    options: Mapping[str, JsonValue] = MappingProxyType({}),
    result_path: Path | None = None,
) -> dict[str, str]:
    """A summary of the run that a configuration file begins, by headings. Raises ConfigError for one that cannot.

    Arguments: as those of `finetune.Request`.
    """
    loaded = config_file.load(path, overrides, options=options)
    check_result(result_path)
    Workspace(workspace).check()
    examples = check_run(RunRequest(loaded, workspace, path.stem))
    return summary_of(loaded.config, 0 if examples is None else len(examples))


def summary_of(config: RunConfig, num_examples: int) -> dict[str, str]:
    """The models, the algorithm, the extent and the engine of a run, by headings."""
    plans = [spec.plan for spec in jobs_of(config, "run") if not spec.plan.tasks_of and not spec.is_frozen]
    algorithms = {name: one.adapter.algorithm.name for name, one in config.trained().items()}
    return {
        "workflow": f"{config.nat_workflow or config.environment}, {num_examples} examples",
        "model groups": ", ".join(_model(config, name) for name in config.by_group()),
        "algorithm": _algorithm(config, algorithms),
        "training": "; then ".join(_extent(plan, num_examples) for plan in plans),
        "engine": _engine(config),
    }


def _model(config: RunConfig, name: str) -> str:
    if config.is_external:
        return f"{name} (held by another training backend)"
    if name in served_models(config):
        return f"{name} (served by others)"
    path = config.by_group()[name].adapter.model.path
    return f"{name} ({path})" if name in config.trained() else f"{name} ({path}, not trained)"


def _algorithm(config: RunConfig, algorithms: Mapping[str, str]) -> str:
    if config.is_external:
        return "of another training backend"
    names = set(algorithms.values())
    found = names.pop() if len(names) == 1 else ", ".join(f"{name}: {one}" for name, one in algorithms.items())
    return found if config.adapter.warm_start is None else f"sft as a warm start, then {found}"


def _extent(plan: PlanSettings, num_examples: int) -> str:
    num_tasks = num_examples if plan.planning == "submitted" else plan.tasks_per_epoch
    return f"{plan.num_epochs} epochs x {num_tasks} tasks x {plan.num_generations} generations"


def _engine(config: RunConfig) -> str:
    if config.builder.services == "external":
        return "of the external services"
    if not config.is_external and config.environment not in MADE_ELSEWHERE:
        return config.builder.engine.kind
    return "none: rollouts are made elsewhere" if config.served is None else f"{config.served.engine.kind} (endpoint)"
