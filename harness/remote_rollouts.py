"""`--endpoint`: the builder of a run whose rollouts a running workflow plays, behind NAT's HTTP server. Pure."""

import inspect
from typing import Any

from rollstream.schemas.config import BuilderSection
from rollstream.schemas.finetuning import FinetuneConfig

REMOTE = "remote_workflow"
MARGIN_S = 10.0
"""What a rollout may take beside the endpoint's answer."""


def at_endpoint(builder: BuilderSection, finetune: FinetuneConfig) -> BuilderSection:
    """The builder with the environment `remote_workflow`, if an endpoint is given; else the builder as it is.

    Of `environment_config` what that environment takes is kept. Time limits that are not set fit the endpoint's.
    """
    run = finetune.run_configuration
    if run is None or run.endpoint is None:
        return builder
    config: dict[str, Any] = {key: value for key, value in builder.environment_config.items() if key in _parameters()}
    config |= {
        "endpoint": run.endpoint,
        "endpoint_timeout": float(run.endpoint_timeout),
        "target_functions": list(finetune.target_functions),
        "target_model": finetune.target_model,
        "result_json_path": run.result_json_path,
    }
    changes: dict[str, Any] = {"environment": REMOTE, "environment_config": config}
    rollout_s = run.endpoint_timeout + MARGIN_S
    if "rollout_timeout_s" not in builder.model_fields_set:
        changes["rollout_timeout_s"] = max(builder.rollout_timeout_s, rollout_s)
    if "group_timeout_s" not in builder.model_fields_set:
        changes["group_timeout_s"] = max(builder.group_timeout_s, 2 * rollout_s)
    return builder.model_copy(update=changes)


def _parameters() -> set[str]:
    from rollstream.producers import registry

    return set(inspect.signature(registry.environment(REMOTE)).parameters)
