"""A variable that the own configuration uses may be used by a record in the same text at the same place alone."""

from typing import Any

import pytest

from rollstream.producers.attempt import refusal
from rollstream.schemas.errors import NotAllowedError
from rollstream.schemas.permissions import Permissions, environment_path, named_by, named_by_model
from rollstream.schemas.settings import RolloutSettings

SECRET = "hunter2-b7e1"
JUDGE: dict[str, Any] = {"_type": "llm_judge", "model": "m", "prompt": "{response}"}
OWN = RolloutSettings(
    environment="remote_workflow",
    environment_config={"endpoint": "${FLOW}", "headers": {"Authorization": "Bearer ${KEY}"}, "tags": ["${TAG:-x}"]},
    rewards=("judge", "match"),
    evaluators={
        "judge": JUDGE | {"base_url": "http://${HOST}/v1", "api_key": "${KEY}"},
        "match": {"_type": "regex", "pattern": "yes"},
    },
)
ENV = {"HOST": "judge", "KEY": SECRET, "FLOW": "http://flow/v1", "TAG": "t", "MODELS": "/models"}


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluators": {**OWN.evaluators, "match": {"_type": "regex", "pattern": "${KEY}"}}},
        {"evaluators": {**OWN.evaluators, "match": {"_type": "regex", "pattern": "^.{12}$|${KEY:-x}"}}},
        {"evaluators": {**OWN.evaluators, "judge": {"_type": "regex", "pattern": "x", "api_key": "${KEY}"}}},
        {"evaluators": {"other": OWN.evaluators["judge"]}, "rewards": ("other",)},
        {"evaluators": {**OWN.evaluators, "judge": OWN.evaluators["judge"] | {"prompt": "{response} ${KEY}"}}},
        {"evaluators": {**OWN.evaluators, "judge": OWN.evaluators["judge"] | {"base_url": "http://judge/${KEY}"}}},
        {"evaluators": {**OWN.evaluators, "judge": OWN.evaluators["judge"] | {"api_key": "${KEY}x"}}},
        {"environment": "guess_number"},
        {"environment_config": {"endpoint": "http://flow/v1/${KEY}"}},
        {"environment_config": {"endpoint": "${FLOW}", "headers": {"X": "Bearer ${KEY}"}}},
        {"environment_config": {"endpoint": "${FLOW}", "headers.Authorization": "Bearer ${KEY}"}},
        {"environment_config": {"endpoint": "${FLOW}", "headers": ["Bearer ${KEY}"]}},
        {"environment_config": {"endpoint": "${FLOW}", "tags": ["x", "${TAG:-x}"]}},
        {"environment_config": {"endpoint": "${MODELS}"}},
        {"environment_config": {"endpoint": "${FLOW}", "\ud800": "${KEY}"}},
    ],
)
def test_a_variable_that_the_own_configuration_uses_may_be_used_in_its_place_only(changes: dict[str, Any]):
    permissions = Permissions.of([*named_by(OWN), *named_by_model("${MODELS}/tiny")], ENV)
    assert refusal(OWN, permissions) is None
    refused = refusal(OWN.model_copy(update=changes), permissions)
    assert refused is not None
    assert "is not allowed" in refused
    assert SECRET not in refused


def test_a_variable_that_is_allowed_by_its_name_may_be_used_anywhere():
    everywhere = Permissions.of(["${KEY}", "http://${HOST}/v1", "${HOST}", "${FLOW}", "${TAG}"], ENV)
    assert refusal(OWN, everywhere) is None
    pattern = {"match": {"_type": "regex", "pattern": "${KEY}"}}
    assert refusal(OWN.model_copy(update={"evaluators": pattern, "rewards": ("match",)}), everywhere) is None


def test_the_own_configuration_is_expanded():
    permissions = Permissions.of(named_by(OWN), ENV)
    path = environment_path("remote_workflow")
    assert permissions.expand(OWN.environment_config, "c", path) == {
        "endpoint": "http://flow/v1",
        "headers": {"Authorization": f"Bearer {SECRET}"},
        "tags": ["t"],
    }
    own = Permissions.of(named_by_model("${MODELS}/tiny"), ENV)
    assert own.model_path("${MODELS}/tiny", "base_model") == own.model_path("/models/tiny", "base_model")
    with pytest.raises(NotAllowedError, match="KEY"):
        own.model_path("/models/tiny/${KEY}", "base_model")
