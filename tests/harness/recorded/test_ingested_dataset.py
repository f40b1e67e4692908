"""The dataset and the configuration of a run that is made from a file of recorded steps."""

import itertools
import json

import pytest
import yaml

from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import jobs_of
from rollstream.harness.recorded.ingest import prepare
from rollstream.harness.runs.plan import examples_of
from rollstream.schemas.errors import ConfigError
from tests.harness.recorded.ingest_rig import lines, run_of
from tests.rigs import nat_samples as nat


@pytest.fixture
def configured(write, written):
    """Path of a configuration for recorded rollouts, with `changes` to its two blocks."""

    def make(builder=None, adapter=None):
        del written["workflow"]
        written["trajectory_builders"]["b"] |= builder or {}
        written["trainer_adapters"]["a"] |= adapter or {}
        return write(written)

    return make


def test_a_file_becomes_the_dataset_and_the_size_of_a_run(tmp_path, configured):
    file = tmp_path / "steps.jsonl"
    runs = [run_of("a"), run_of("b"), run_of("c", question="2+2")]
    file.write_bytes(b"\n".join(lines(*itertools.chain(*runs), "bad")))
    config = configured({"environment_config": {"retokenise": True}})
    prepared = prepare(file, config, tmp_path / "work", ())
    loaded = config_file.load(config, prepared.overrides, options={"dataset": str(prepared.dataset)})
    examples = examples_of(loaded.config)
    assert [len(example.inputs["recorded"]) for example in examples] == [2, 1]
    assert examples[0].inputs["question"] == "1+1"
    [job] = jobs_of(loaded.config, "run-1")
    assert (job.rollout.environment, job.rollout.environment_config) == ("recorded", {"retokenise": True})
    assert (job.plan.num_generations, job.plan.tasks_per_epoch, job.rollout.policy) == (2, 2, "model")
    assert prepare(file, config, tmp_path / "work", ()).dataset == prepared.dataset
    assert len(prepared.ingested.bad) == 1


@pytest.mark.parametrize(
    "section",
    [
        {"id_key": "uid"},
        {"_type": "csv", "structure": {"question_key": "prompt"}},
        {"filter": {"allowlist": {"field": {"id": ["none"]}}}},
        {"_type": "xls"},
    ],
    ids=str,
)
def test_the_files_own_dataset_does_not_apply_to_the_recorded_rollouts(tmp_path, configured, written, section):
    file = tmp_path / "steps.jsonl"
    file.write_bytes(b"\n".join(lines(*run_of("a"), *run_of("b", question="2+2"))))
    written["eval"] = {"general": {"dataset": {"_type": "jsonl", "file_path": "own.jsonl", **section}}}
    config = configured()
    prepared = prepare(file, config, tmp_path / "work", ())
    loaded = config_file.load(config, prepared.overrides, options={"dataset": str(prepared.dataset)})
    assert len(examples_of(loaded.config)) == 2


def rollouts(*inputs):
    """Lines of one rollout for each example."""
    return lines(
        *(
            {"rollout_id": f"r{n}", "example_id": f"x{n}", "inputs": own, "steps": run_of(f"u{n}"), "reward": 1.0}
            for n, own in enumerate(inputs)
        )
    )


@pytest.mark.parametrize("values", [("q1", "q1"), (None, "q2"), (7, 8)], ids=str)
def test_an_input_named_id_is_not_the_examples_id(tmp_path, configured, written, values):
    file = tmp_path / "steps.jsonl"
    file.write_bytes(b"\n".join(rollouts(*({"id": value, "_id": 1} for value in values))))
    written["eval"] = {"general": {"dataset": {"_type": "jsonl", "file_path": "own.jsonl", "id_key": "uid"}}}
    config = configured()
    prepared = prepare(file, config, tmp_path / "work", ())
    loaded = config_file.load(config, prepared.overrides, options={"dataset": str(prepared.dataset)})
    examples = examples_of(loaded.config)
    assert [example.example_id for example in examples] == ["x0", "x1"]
    assert [example.inputs["id"] for example in examples] == list(values)
    assert {tuple(sorted(example.inputs)) for example in examples} == {("_id", "id", "recorded")}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [({"recorded": True}, "an input is named 'recorded'"), ({"doc": "x" * 600_000}, "bytes of inputs, more than")],
    ids=["name", "size"],
)
def test_inputs_that_no_task_can_hold_are_a_bad_line(tmp_path, configured, bad, reason):
    file = tmp_path / "steps.jsonl"
    file.write_bytes(b"\n".join(rollouts(bad, {"doc": "x" * 400_000})))
    config = configured()
    prepared = prepare(file, config, tmp_path / "work", ())
    assert [line.number for line in prepared.ingested.bad] == [1]
    assert reason in prepared.ingested.bad[0].reason
    loaded = config_file.load(config, prepared.overrides, options={"dataset": str(prepared.dataset)})
    assert [example.example_id for example in examples_of(loaded.config)] == ["x1"]


def test_rollouts_of_large_inputs_are_stored_apart(tmp_path, configured):
    file = tmp_path / "steps.jsonl"
    long = nat.langchain("u", nat.messages("x" * 100_000), "2", parent="root")
    line = {"rollout_id": "r", "example_id": "x", "inputs": {"doc": "x" * 400_000}, "steps": list(long), "reward": 1.0}
    file.write_bytes(b"\n".join(lines(line)))
    config = configured()
    prepared = prepare(file, config, tmp_path / "work", ())
    [example] = examples_of(
        config_file.load(config, (*prepared.overrides,), options={"dataset": str(prepared.dataset)}).config
    )
    assert "artifact" in example.inputs["recorded"][0]


def test_sft_needs_one_rollout_per_example(tmp_path, configured):
    file = tmp_path / "steps.jsonl"
    file.write_bytes(b"\n".join(lines(*run_of("a"))))
    config = configured(adapter={"algorithm": {"name": "sft"}})
    prepared = prepare(file, config, tmp_path / "work", ())
    [job] = jobs_of(config_file.load(config, prepared.overrides).config, "run-1")
    assert (job.plan.num_generations, job.plan.min_generations, job.rollout.policy) == (1, 1, "demonstration")


def test_large_rollouts_lie_in_the_runs_artifact_store(tmp_path, configured):
    file = tmp_path / "steps.jsonl"
    long = nat.langchain("u", nat.messages("x" * 100_000), "2", parent="root")
    file.write_bytes(b"\n".join(lines({"rollout_id": "r", "example_id": "x", "steps": long, "reward": 1})))
    prepared = prepare(file, configured(), tmp_path / "work", ())
    row = json.loads(prepared.dataset.read_text())
    assert (tmp_path / "work" / "artifacts" / row["recorded"][0]["artifact"]["uri"]).is_file()
    assert len(prepared.dataset.read_text()) < 1000


@pytest.mark.parametrize(
    ("content", "builder", "message"),
    [
        (b"", {}, "contains no usable rollout"),
        (b"{\n{", {}, "contains no usable rollout; correct line 1: not valid JSON"),
        (None, {}, "steps.jsonl: cannot be read"),
        (b"{}", {"environment": "arithmetic"}, "trajectory_builders.b.environment: is 'arithmetic', but ingest uses"),
    ],
)
def test_a_file_or_configuration_that_cannot_be_used_is_one_clear_error(
    tmp_path, configured, content, builder, message
):
    file = tmp_path / "steps.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        prepare(file, configured(builder), tmp_path / "work", ())
    assert message in str(caught.value)


def test_rollouts_without_rewards_are_refused_where_the_named_reward_is_not_run(tmp_path, configured, written):
    file = tmp_path / "steps.jsonl"
    file.write_bytes(b"\n".join(lines(*run_of("a"))))
    written["eval"] = {"evaluators": {"right": {"_type": "exact_match"}}}
    written["finetuning"] |= {"reward_function": {"name": "right"}}
    config = configured()
    with pytest.raises(ConfigError, match=r"no rollout has a reward.*`trajectory_builders\.b\.rewards: \[right\]`"):
        prepare(file, config, tmp_path / "work", ())
    prepare(file, config, tmp_path / "work", (("trajectory_builders.b.rewards", "[right]"),))
    rewarded = json.dumps({"rollout_id": "r", "example_id": "x", "steps": run_of("b"), "reward": 1})
    file.write_text(rewarded)
    prepare(file, config, tmp_path / "work", ())


def test_a_configuration_without_a_builder_is_refused(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"finetuning": {"trajectory_builder": "b"}}))
    file = tmp_path / "steps.jsonl"
    file.write_bytes(b"{}")
    with pytest.raises(ConfigError, match="trajectory_builders"):
        prepare(file, config, tmp_path / "work", ())
