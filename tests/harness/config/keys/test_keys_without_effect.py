"""Keys of an engine's block and of adapters that were set but have no effect are named once, with reason and remedy."""

import copy
from typing import Any

import pytest

from rollstream.harness.config import checks
from rollstream.harness.config import file as config_file
from rollstream.schemas.engine_settings import ENGINES, EngineSettings

CACHES = {"prefix_cache_mb": 1, "kv_cache_mb": 64, "full_copies": 2}
LORA = {"rank": 4}
URLS = ["http://127.0.0.1:8000"]
NO_CACHES = "prefix_cache_mb, kv_cache_mb, full_copies: accepted, but ignored here (batching is static; leave it out, "
ONE_AT_A_TIME = "accepted, but ignored here (deterministic generates one request at a time, without caches; leave it"
RATIOS = "grpo: the loss compares log-probabilities that are computed without dropout; leave it out"

WITH_FROZEN = {"model_groups": {"policy": {}, "judge": {"frozen": True, "model": {"path": "/judge"}}}}
"""Another model group, which has full weights."""


def warnings_of(written: dict[str, Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of a file about keys that are ignored."""
    checks.forget()
    caplog.clear()
    config_file.resolve(written)
    return [one.getMessage() for one in caplog.records if "ignored here" in one.getMessage()]


def changed(written: dict[str, Any], engine: dict[str, Any], adapter: dict[str, Any]) -> dict[str, Any]:
    """The file with an engine's block, and with further keys of its adapter's."""
    found = copy.deepcopy(written)
    found["trajectory_builders"]["b"]["engine"] = engine
    if groups := adapter.get("model_groups"):
        found["trajectory_builders"]["b"]["agents"] = {name: name for name in groups}
    model = {**found["trainer_adapters"]["a"]["model"], **adapter.pop("model", {})}
    found["trainer_adapters"]["a"] |= {**adapter, "model": model}
    return found


@pytest.mark.parametrize(
    ("engine", "adapter", "warning"),
    [
        (CACHES | {"max_batch": 8}, {}, ""),
        ({"batching": "static", "max_batch": 8}, {}, ""),
        ({"deterministic": True, "threads": 2, "dtype": "float32"}, {}, ""),
        ({"batching": "static", **CACHES}, {}, NO_CACHES),
        (
            {"deterministic": True, "batching": "continuous", "max_batch": 256, **CACHES},
            {},
            f"batching, max_batch, prefix_cache_mb, kv_cache_mb, full_copies: {ONE_AT_A_TIME}",
        ),
        (
            {"full_copies": 2},
            {"model": {"lora": LORA}},
            "full_copies: accepted, but ignored here (two versions of an adapter need no second copy of the model",
        ),
        ({"kind": "vllm", "dtype": "float32", "check_weights": True}, {}, ""),
        ({"kind": "vllm", "max_loras": 8, "check_weights": False}, {"model": {"lora": LORA}}, ""),
        (
            {"kind": "vllm", "dtype": "float32", "base_urls": URLS},
            {},
            "dtype: accepted, but ignored here (the servers of base_urls are started already; give --dtype to those)",
        ),
        (
            {"kind": "vllm", "max_loras": 8, "max_lora_rank": 8},
            {},
            "max_loras, max_lora_rank: accepted, but ignored here (the run has no adapters; leave it out)",
        ),
        (
            {"kind": "vllm", "check_weights": True},
            {"model": {"lora": LORA}},
            "check_weights: accepted, but ignored here (it compares full weights, and the run has adapters; leave it",
        ),
        ({"kind": "vllm", "check_weights": True, "max_loras": 8}, {"model": {"lora": LORA}, **WITH_FROZEN}, ""),
        ({"kind": "scripted", "threads": 1}, {}, "threads: accepted, but ignored here (the scripted engine does not"),
    ],
)
def test_a_key_of_an_engine_without_effect_is_reported_once(
    written: dict[str, Any],
    engine: dict[str, Any],
    adapter: dict[str, Any],
    warning: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = warnings_of(changed(written, dict(engine), dict(adapter)), caplog)
    assert [one.startswith(f"trajectory_builders.b.engine: {warning}") for one in found] == ([True] if warning else [])


def test_an_endpoints_engine_is_looked_at_too(written: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    engine = {"deterministic": True, "max_batch": 8}
    found = warnings_of(changed(written, {}, {"endpoint": {"engine": engine}}), caplog)
    assert [one.split(": accepted")[0] for one in found] == ["trainer_adapters.a.endpoint.engine: max_batch"]


@pytest.mark.parametrize("kind", ENGINES)
def test_keys_that_an_engine_reports_were_given(kind: str) -> None:
    """Each reason ends with the remedy."""
    every: dict[str, Any] = {"base_url": "http://h/v1", "base_urls": URLS, "deterministic": True, "check_weights": True}
    fields = ENGINES[kind].model_fields
    settings: EngineSettings = ENGINES[kind](**{key: value for key, value in every.items() if key in fields})
    for has_adapters, has_full_weights in ((True, False), (False, True), (True, True)):
        found = settings.unused(has_adapters=has_adapters, has_full_weights=has_full_weights)
        assert {name for names in found.values() for name in names} <= settings.model_fields_set
        assert all("; " in why for why in found)


@pytest.mark.parametrize("planning", ["stream", "submitted"])
def test_dropping_groups_of_equal_rewards_is_reported_in_an_epochwise_run(
    written: dict[str, Any], planning: str, caplog: pytest.LogCaptureFixture
) -> None:
    written = changed(written, {}, {"max_staleness": 0})
    written["trainers"]["t"] = {"_type": "rollstream", "planning": planning}
    assert warnings_of(written, caplog) == []
    written["trajectory_builders"]["b"]["drop_zero_variance"] = True
    where = "trajectory_builders.b: drop_zero_variance: accepted, but ignored here (an epochwise run trains what its"
    assert [one.startswith(where) for one in warnings_of(written, caplog)] == [True] * (planning == "submitted")


TWO_GROUPS = {"solver": {"algorithm": {"name": "sft"}}, "critic": {}}


@pytest.mark.parametrize(
    ("adapter", "is_unused"),
    [
        ({}, True),
        ({"algorithm": {"name": "sft"}}, False),
        ({"algorithm": {"name": "expert_iteration"}}, False),
        ({"warm_start": {}}, False),
        ({"model_groups": TWO_GROUPS}, False),
        ({"model_groups": {"solver": {}, "critic": {}}}, True),
    ],
)
def test_dropout_that_no_job_applies_is_reported(
    written: dict[str, Any], adapter: dict[str, Any], is_unused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = warnings_of(changed(written, {}, {"model": {"lora": LORA | {"dropout": 0.1}}, **adapter}), caplog)
    where = "trainer_adapters.a.model.lora: dropout: accepted, but ignored here"
    assert found == ([f"{where} ({RATIOS})"] if is_unused else [])
