"""The recorded configuration of a what-if with the keys of its file."""

from typing import Any

import pytest
from pydantic import JsonValue

from rollstream.harness.config.file import block_at
from rollstream.harness.replays.changed_config import changed
from rollstream.schemas.errors import ConfigError

RECORDED = {"name": "grpo", "clip_low": 0.2, "mini_batches": 2, "temperature": 0.7}


def of_adapter(**blocks: Any) -> dict[str, Any]:
    return {"trainer_adapters": {"learner": blocks}}


def test_changes_are_merged_mapping_by_mapping() -> None:
    assert changed({"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"c": [2]}, "e": 3}) == {
        "a": {"b": 1, "c": [2]},
        "d": 2,
        "e": 3,
    }


@pytest.mark.parametrize(
    ("recorded", "given", "expected"),
    [
        (RECORDED, {"name": "gspo"}, {"name": "gspo", "mini_batches": 2, "temperature": 0.7}),
        (RECORDED, {"name": "kto", "mini_batches": 1}, {"name": "kto", "mini_batches": 1, "temperature": 0.7}),
        (RECORDED, {"name": "grpo", "clip_low": 0.1}, {**RECORDED, "clip_low": 0.1}),
        (RECORDED, {"name": "${WHAT_IF_ALGORITHM}"}, {**RECORDED, "name": "${WHAT_IF_ALGORITHM}"}),
        ({"clip_low": 0.2}, {"name": "grpo"}, {"name": "grpo", "clip_low": 0.2}),
        ({"name": "python:a.One", "options": {"beta": 1}}, {"name": "python:a.Other"}, {"name": "python:a.Other"}),
    ],
)
def test_another_algorithm_keeps_only_what_all_algorithms_share(
    recorded: dict[str, Any], given: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHAT_IF_ALGORITHM", "grpo")
    assert changed(of_adapter(algorithm=recorded), of_adapter(algorithm=given)) == of_adapter(algorithm=expected)


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^trainer_adapters\.learner\.algorithm\.name: .* NOT_SET_HERE is not set"):
        changed(of_adapter(algorithm=RECORDED), of_adapter(algorithm={"name": "${NOT_SET_HERE}"}))


@pytest.mark.parametrize(("own", "learning_rate"), [({}, 0.1), ({"optimizer": None}, 0.1), ({"optimizer": {}}, None)])
def test_a_model_group_that_changes_nothing_keeps_the_block_that_it_has(
    own: dict[str, JsonValue], learning_rate: float | None
) -> None:
    recorded = of_adapter(optimizer={"learning_rate": 0.1}, model_groups={"solver": own})
    result = changed(recorded, of_adapter(model_groups={"solver": {"optimizer": {}}}))
    found = block_at(result, "trainer_adapters", "learner", "model_groups", "solver", "optimizer")
    assert found.get("learning_rate") == learning_rate


def test_a_model_group_changes_the_block_that_it_has_of_its_adapter() -> None:
    own = {"name": "cispo", "clip_high": 3.0}
    recorded = of_adapter(
        algorithm=RECORDED, optimizer={"kind": "muon"}, model_groups={"solver": {}, "critic": {"algorithm": own}}
    )
    solver = {"algorithm": {"name": "gspo"}, "optimizer": {"learning_rate": 1e-3}}
    result = changed(recorded, of_adapter(algorithm={"name": "sapo"}, model_groups={"solver": solver}))
    common = {"mini_batches": 2, "temperature": 0.7}
    assert result == of_adapter(
        algorithm={"name": "sapo", **common},
        optimizer={"kind": "muon"},
        model_groups={
            "solver": {"algorithm": {"name": "gspo", **common}, "optimizer": {"kind": "muon", "learning_rate": 1e-3}},
            "critic": {"algorithm": own},
        },
    )


@pytest.mark.parametrize(
    ("path", "recorded", "given", "keeps"),
    [
        (("eval", "evaluators", "right"), {"_type": "numeric_match", "take": "last"}, {"_type": "exact_match"}, False),
        (("eval", "evaluators", "right"), {"_type": "regex", "x": 1}, {"_type": "rollstream_regex"}, True),
        (("trainers", "trainer"), {"planning": "stream"}, {"_type": "mine"}, False),
        (("trainers", "trainer"), {"planning": "stream"}, {"_type": "rollstream"}, True),
        (("trajectory_builders", "rollouts", "engine"), {"threads": 1}, {"kind": "scripted"}, False),
        (("trainer_adapters", "learner", "optimizer"), {"learning_rate": 1e-3}, {"kind": "muon"}, True),
    ],
)
def test_a_block_of_another_type_is_as_the_file_writes_it(
    path: tuple[str, ...], recorded: dict[str, Any], given: dict[str, Any], keeps: bool
) -> None:
    def at(block: dict[str, Any]) -> dict[str, Any]:
        for key in reversed(path):
            block = {key: block}
        return block

    assert changed(at(recorded), at(given)) == at({**recorded, **given} if keeps else given)
