"""The projection: what a run leaves in the file, and that crashes and repeats change nothing of it."""

import asyncio
from pathlib import Path
from typing import Any

import duckdb
import pytest

from rollstream.eventlog.dead_letters import send_dead_letter
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.connection import MetricsFileError, connect
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.projector import Projector, project_to_end
from rollstream.schemas import events, tokens
from rollstream.schemas.base import Event
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events.rollouts import LLMCall, Prefix
from rollstream.schemas.events.weights import Scorer
from tests.metrics.conftest import ask, empty_file, grow


def log_of(found: list[Event]) -> MemoryLog:
    log = MemoryLog(num_partitions=2)
    asyncio.run(log.send_all(found))
    return log


JOB = {"run_id": "run-1", "time_ms": 1, "model_group": "run-1/policy", "job_id": "run-1/rl"}
ALL = [
    "runs", "epochs", "tasks", "rollouts", "steps", "rewards", "trajectories", "groups", "rejections",
    "batches", "batch_members", "training_steps", "weight_versions", "engine_mismatch", "weight_loads",
    "reference_scores", "jobs", "validations", "dead_letters", "offsets", "epoch_summary", "outcomes", "staleness",
    "token_staleness", "example_difficulty", "wasted_tokens", "lineage",
]  # fmt: skip


def everything(path: Path) -> dict[str, list[Any]]:
    """All rows of all public tables but for the clock time."""
    clock = {
        "runs": "EXCLUDE (started_at, ended_at, seconds)",
        "jobs": "EXCLUDE (started_at, ended_at)",
        "epochs": "EXCLUDE (started_at, sealed_at, seconds)",
        "epoch_summary": "EXCLUDE (started_at, sealed_at, seconds)",
        "validations": "EXCLUDE (ended_at)",
        "weight_versions": "EXCLUDE (published_at)",
        "weight_loads": "EXCLUDE (loaded_at)",
        "groups": "EXCLUDE (wait_seconds)",
    }
    with connect(path, read_only=True) as connection:
        found = {
            name: connection.execute(f"SELECT * {clock.get(name, '')} FROM {name} ORDER BY ALL").fetchall()
            for name in ALL
        }
    found["offsets"] = [row[:3] for row in found["offsets"]]
    return found


def test_every_public_table_has_the_run(tmp_path: Path, synthetic: Any) -> None:
    path = empty_file(tmp_path)
    grow(log_of(list(synthetic.all_events())), path)
    found = everything(path)
    num_groups = 9
    assert {name: len(rows) for name, rows in found.items() if name != "offsets"} == {
        "runs": 1, "epochs": 3, "tasks": num_groups, "rollouts": num_groups * 4 + 3, "steps": num_groups * 8 + 3,
        "rewards": num_groups * 4, "trajectories": num_groups * 4, "groups": num_groups, "rejections": 12, "batches": 3,
        "batch_members": 24, "training_steps": 3, "weight_versions": 4, "engine_mismatch": 0,
        "weight_loads": 0, "reference_scores": 0, "jobs": 2, "validations": 0,
        "dead_letters": 0, "epoch_summary": 2, "outcomes": 39, "staleness": 3, "token_staleness": 0,
        "example_difficulty": 3, "wasted_tokens": 2, "lineage": num_groups * 8 + 3,
    }  # fmt: skip


def test_the_epoch_summary_shows_the_rl_epochs_in_order(tmp_path: Path, synthetic: Any) -> None:
    path = empty_file(tmp_path)
    grow(log_of(list(synthetic.all_events())), path)
    found = ask(
        path, "SELECT epoch, round(avg_reward, 6), trained_groups, groups, zero_variance_groups FROM epoch_summary"
    )
    assert found == [(0, round((0.25 + 0.25 + 0.5) / 3, 6), 2, 3, 1), (1, round((0.3 + 0.3 + 0.5) / 3, 6), 2, 3, 1)]
    assert ask(path, "SELECT kind, epoch FROM epochs") == [("sft", 0), ("rl", 0), ("rl", 1)]


def test_a_training_step_has_the_preference_accuracy_of_its_metrics(tmp_path: Path, synthetic: Any) -> None:
    reported = {"loss/total": 0.5, "dpo/accuracy": 0.75, "dpo/margin": 0.125, "dpo/pairs": 8.0}
    made = list(synthetic.all_events())
    last = max(at for at, event in enumerate(made) if isinstance(event, events.StepTrained))
    made[last] = made[last].model_copy(update={"metrics": reported})
    path = empty_file(tmp_path)
    grow(log_of(made), path)
    found = ask(path, "SELECT loss, preference_accuracy, preference_margin, metrics['dpo/pairs'] FROM training_steps")
    assert found[-1] == (0.5, 0.75, 0.125, 8.0)
    assert {row[1:] for row in found[:-1]} == {(None, None, None)}


def test_scores_are_shown_once_a_trajectory_and_scorer_with_their_mean(tmp_path: Path) -> None:
    def scored(part: int, logprobs: list[float], *, version: int = 1, term: int = 1) -> Event:
        scorer = Scorer(role="teacher", model="wise")
        return events.ReferenceScored(
            **JOB, batch_id="b0", version=version, term=term, trajectory_id="t0", trajectory_sha256="aa", scorer=scorer,
            part=part, num_parts=2, logprobs=tokens.encode_floats(logprobs),
        )  # fmt: skip

    path = empty_file(tmp_path)
    made = [scored(0, [-1.0, -2.0]), scored(0, [-1.0, -2.0], term=2), scored(1, [-6.0]), scored(1, [-6.0], version=2)]
    grow(log_of(made), path)
    columns = "version, batch_id, trajectory_id, role, model, num_tokens, mean_logprob"
    found = ask(path, f"SELECT {columns} FROM reference_scores")
    assert found == [(1, "b0", "t0", "teacher", "wise", 3, -3.0)]


def test_a_job_shows_the_phase_finish_of_its_last_version_where_it_was_measured(tmp_path: Path, synthetic: Any) -> None:
    made = list(synthetic.all_events())
    last = max(at for at, event in enumerate(made) if isinstance(event, events.JobSucceeded))
    made[last] = made[last].model_copy(update={"finish_s": 0.0})
    path = empty_file(tmp_path)
    grow(log_of(made), path)
    assert ask(path, "SELECT kind, finish_s FROM jobs ORDER BY kind DESC") == [("sft", 0.5), ("rl", None)]


@pytest.mark.parametrize(
    ("ended", "error"), [(events.JobFailed(**JOB, error="no room"), "no room"), (events.JobCancelled(**JOB), "")]
)
def test_a_job_that_did_not_succeed_shows_why(tmp_path: Path, ended: Any, error: str) -> None:
    path = empty_file(tmp_path)
    grow(log_of([ended]), path)
    assert ask(path, "SELECT state, error, finish_s FROM log.job_finished") == [(ended.kind[4:], error, None)]


def test_a_skipped_job_is_a_row_of_jobs_and_so_is_the_version_that_its_group_took(tmp_path: Path) -> None:
    path = empty_file(tmp_path)
    skipped = events.JobSkipped(**JOB, job_kind="dpo", num_examples=2, min_examples=10, version=4)
    grow(log_of([skipped, events.ModelSwitched(**JOB, version=4)]), path)
    found = ask(path, "SELECT run_id, model_group, kind, state, version, adopted_version, error FROM jobs")
    names = JOB["run_id"], JOB["model_group"]
    assert found == [(*names, "dpo", "skipped", 4, 4, "2 examples, at least 10 are needed")]


def test_every_attempt_has_one_outcome_and_they_add_up(tmp_path: Path, synthetic: Any) -> None:
    path = empty_file(tmp_path)
    grow(log_of(list(synthetic.all_events())), path)
    found = ask(path, "SELECT outcome, cause, count(*), sum(tokens) FROM outcomes GROUP BY ALL ORDER BY ALL")
    assert found == [
        ("failed", "producer_lost", 3, 15),
        ("rejected", "zero_variance", 12, 120),
        ("trained", None, 24, 240),
    ]
    assert ask(path, "SELECT count(*) = count(DISTINCT rollout_id) FROM outcomes") == [(True,)]


def test_training_of_another_run_does_not_change_a_rollouts_outcome(tmp_path: Path, synthetic: Any) -> None:
    found = list(synthetic.all_events())
    reported = "SELECT * FROM outcomes ORDER BY rollout_id"
    grow(log_of(found), tmp_path / "alone.duckdb")
    rejected = next(event for event in found if isinstance(event, events.TrajectoryRejected))
    planned = next(event for event in found if isinstance(event, events.BatchPlanned))
    trained = next(event for event in found if isinstance(event, events.StepTrained))
    member = planned.members[0].model_copy(
        update={key: getattr(rejected, key) for key in ("trajectory_id", "rollout_id", "group_id")}
    )
    other = {"run_id": "what-if", "model_group": "what-if/policy", "batch_id": "what-if/b0"}
    found += [
        planned.model_copy(update=other | {"members": (member,)}),
        trained.model_copy(update=other),
    ]
    grow(log_of(found), tmp_path / "both.duckdb")
    assert ask(tmp_path / "both.duckdb", "SELECT is_trained FROM batches WHERE run_id = 'what-if'") == [(True,)]
    assert ask(tmp_path / "both.duckdb", reported) == ask(tmp_path / "alone.duckdb", reported)


def test_calls_without_log_probabilities_and_discarded_ones_are_waste_of_a_trained_rollout(
    tmp_path: Path, synthetic: Any
) -> None:
    found: list[Any] = list(synthetic.all_events())
    for index, event in enumerate(found):
        if event.kind == "group_closed" and event.index < 2:
            unused = ({"num_without_logprobs": m.member, "num_dead_tokens": 2 * m.member} for m in event.members)
            members = tuple(m.model_copy(update=more) for m, more in zip(event.members, unused, strict=True))
            found[index] = event.model_copy(update={"members": members})
    path = empty_file(tmp_path)
    grow(log_of(found), path)
    wasted = ask(path, "SELECT cause, outcome, num_rollouts, num_tokens FROM wasted_tokens")
    assert wasted == [
        ("zero_variance", "rejected", 12, 120),
        ("dead_branch", "trained", 3 * 2 * 3, 3 * 2 * 12),
        ("no_logprobs", "trained", 2 * 2 * 3, 2 * 2 * 6),
        ("producer_lost", "failed", 3, 15),
    ]


def test_a_prompt_goes_on_from_an_earlier_call_or_forks(tmp_path: Path) -> None:
    lengths = {0: (4, None, 0), 1: (3, 0, 7), 2: (3, 0, 6), 3: (3, 1, 7), 5: (3, None, 0)}
    calls = {
        index: LLMCall(
            prefix=None if at is None else Prefix(step_index=at, length=length, sha256="0" * 64),
            prompt_ids=tokens.encode_ids([1] * num_new),
            completion_ids=tokens.encode_ids([2] * 3),
        )
        for index, (num_new, at, length) in lengths.items()
    }
    base = {"run_id": "r", "time_ms": 0, "group_id": "r/g", "rollout_id": "r/g/m0/a0", "event_type": "LLM_END"}
    steps: list[Event] = [
        events.StepRecorded(**base, step_index=index, agent="agent", uuid=f"{index}", llm=call)
        for index, call in calls.items()
    ]
    path = empty_file(tmp_path)
    grow(log_of(steps), path)
    found = ask(path, "SELECT step_index, kind, num_prompt_tokens FROM prompts ORDER BY step_index")
    assert found == [(0, "first", 4), (1, "bridged", 10), (2, "spliced", 9), (3, "forked", 10), (5, "forked", 3)]


def test_repeated_events_and_a_second_reading_change_nothing(tmp_path: Path, synthetic: Any) -> None:
    once = list(synthetic.all_events())
    grow(log_of(once), tmp_path / "once.duckdb")
    twice = log_of([event for event in once for _ in range(2)] + once)
    grow(twice, tmp_path / "twice.duckdb")
    grow(twice, tmp_path / "twice.duckdb")
    expected, found = everything(tmp_path / "once.duckdb"), everything(tmp_path / "twice.duckdb")
    for name in set(ALL) - {"offsets", "steps", "rewards", "trajectories"}:
        assert found[name] == expected[name], name
    for name in ("steps", "rewards", "trajectories"):
        assert [row[:-2] for row in found[name]] == [row[:-2] for row in expected[name]], name


class DyingDatabase(Database):
    """Dies in the middle of a transaction, after so many of them."""

    left = 3

    def write(self, rows: Any, offsets: Any) -> None:
        if self.left == 0:
            super().write({**rows, "no_such_table": [{}]}, offsets)
        self.left -= 1
        super().write(rows, offsets)


def test_a_crash_in_a_transaction_leaves_rows_and_offsets_as_one(tmp_path: Path, synthetic: Any) -> None:
    found = list(synthetic.all_events())
    grow(log_of(found), tmp_path / "whole.duckdb")
    log = MemoryLog(num_partitions=2)
    path = tmp_path / "crashed.duckdb"

    async def crash() -> int:
        num_sent = 0
        database = DyingDatabase(path)
        projector = Projector(log, database)
        task = asyncio.create_task(projector.run())
        while not task.done():
            await log.send_all(found[num_sent : num_sent + 40])
            num_sent += 40
            await asyncio.wait(
                {task, asyncio.create_task(projector.wait_for(await projector.ends()))},
                return_when=asyncio.FIRST_COMPLETED,
            )
        with pytest.raises(KeyError):
            await task
        database.close()
        return num_sent

    num_sent = asyncio.run(crash())
    (count,) = ask(path, "SELECT sum(next_offset) FROM offsets")
    assert 0 < count[0] < len(found)
    asyncio.run(log.send_all(found[num_sent:]))
    grow(log, path)
    assert everything(path) == everything(tmp_path / "whole.duckdb")


def test_an_undecodable_record_is_only_in_the_dead_letters(tmp_path: Path) -> None:
    log = MemoryLog(num_partitions=2)

    async def fill() -> None:
        where = await log.send_raw("steps", key=b"r/g", value=b"{", partition=1)
        (record,) = await log.fetch([where])
        for _ in range(2):  # the second one after a crash
            await send_dead_letter(log, record, service="assemble", stage="decode", error=DecodeError("not UTF-8 JSON"))

    asyncio.run(fill())
    path = empty_file(tmp_path)
    grow(log, path)
    found = ask(path, 'SELECT run_id, topic, "partition", "offset", reason, size_bytes FROM dead_letters')
    assert found == [("r", "steps", 1, 0, "not UTF-8 JSON", 1)]
    database = Database(path)
    assert database.offsets()[TopicPartition("steps", 1)] == 1
    database.close()


def test_a_void_term_publishes_nothing(tmp_path: Path, synthetic: Any) -> None:
    zombie = synthetic.published("b", "rl", 1).model_copy(update={"weights_sha256": "f" * 64})
    found = [synthetic.claim(1), synthetic.claim(2), zombie, synthetic.published("b", "rl", 2)]
    path = empty_file(tmp_path)
    grow(log_of(found), path)
    assert ask(path, "SELECT term FROM weight_versions") == [(2,)]


def test_a_collected_version_has_the_time_and_the_collector(tmp_path: Path, synthetic: Any) -> None:
    first = synthetic.published(None, "rl", 1)
    second = first.model_copy(update={"version": first.version + 1, "weights_sha256": "f" * 64})
    collected = events.WeightsCollected(
        run_id=synthetic.run_id,
        time_ms=1_790_000_001_000,
        model_group=synthetic.model_group,
        versions=(first.version,),
        weights_sha256=(first.weights_sha256,),
        artifacts=(first.artifact,),
        by="learner-1",
    )
    path = empty_file(tmp_path)
    grow(log_of([synthetic.claim(1), first, second, collected, collected]), path)
    columns = "version - " + str(first.version) + ", is_collected, epoch_ms(collected_at), collected_by"
    assert ask(path, f"SELECT {columns} FROM weight_versions ORDER BY version") == [
        (0, True, 1_790_000_001_000, "learner-1"),
        (1, False, None, None),
    ]


def test_a_second_end_of_an_attempt_decides_nothing(tmp_path: Path) -> None:
    common = {"run_id": "r", "time_ms": 1, "group_id": "r/j/e/t", "rollout_id": "r/j/e/t/m0/a0"}
    lost = events.RolloutFailed.model_validate(common | {"cause": "producer_lost"})
    late = events.RolloutEnded.model_validate(common | {"num_steps": 0, "num_rewards": 0, "digest": "e"})
    path = empty_file(tmp_path)
    grow(log_of([lost, late]), path)
    assert ask(path, "SELECT state, cause FROM rollouts") == [("failed", "producer_lost")]


def test_the_file_of_another_cluster_is_refused(tmp_path: Path) -> None:
    database = Database(tmp_path / "metrics.duckdb")
    database.claim_cluster("one")
    with pytest.raises(MetricsFileError, match="was made from cluster one, not from two"):
        database.claim_cluster("two")
    database.close()


@pytest.mark.parametrize(
    "sql",
    ["CREATE SCHEMA log", "CREATE SCHEMA log; CREATE TABLE log.meta (other INT)", "CREATE TABLE runs (other INT)"],
)
def test_a_database_of_another_program_is_refused_and_closed(tmp_path: Path, sql: str) -> None:
    path = tmp_path / "metrics.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(sql)
    with pytest.raises(MetricsFileError, match=rf"the metrics file {path} is damaged: .* run `rollstream rebuild`, or"):
        Database(path)
    with duckdb.connect(str(path), config={"memory_limit": "1GB"}):
        pass  # a file that is still open has its first configuration


def test_views_of_another_version_are_made_again_and_rows_stay(tmp_path: Path, synthetic: Any) -> None:
    path = empty_file(tmp_path)
    grow(log_of(list(synthetic.all_events())), path)
    before = everything(path)
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE OR REPLACE VIEW epoch_summary AS SELECT 'old' AS run_id")
        connection.execute("UPDATE log.meta SET value = 'old' WHERE name = 'views_sha256'")
    Database(path).close()
    assert everything(path) == before


def test_an_attempt_that_a_run_leaves_behind_is_dead(tmp_path: Path, synthetic: Any) -> None:
    found = list(synthetic.all_events())
    first = next(i for i, event in enumerate(found) if isinstance(event, events.RolloutStarted))
    path = empty_file(tmp_path)
    log = log_of(found[: first + 2])
    grow(log, path)
    assert ask(path, "SELECT outcome, cause, tokens FROM outcomes") == [("open", "running", 5)]
    asyncio.run(log.send(found[-1]))
    grow(log, path)
    assert ask(path, "SELECT outcome, cause, tokens FROM outcomes") == [("dead", "run_ended", 5)]


def test_a_metrics_file_that_was_removed_while_it_was_open_ends_the_projector_and_is_made_again(
    tmp_path: Path, synthetic: Any
) -> None:
    path, log = empty_file(tmp_path), MemoryLog(num_partitions=2)
    asyncio.run(log.send_all(list(synthetic.all_events())))
    database = Database(path)
    try:
        projector = Projector(log, database)
        path.unlink()
        projector.stop()
        with pytest.raises(MetricsFileError, match="was removed or replaced while in use"):
            asyncio.run(projector.run())
    finally:
        database.close()
    asyncio.run(project_to_end(log, path))
    with duckdb.connect(str(path), read_only=True) as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchall() == [(1,)]
