"""The view `lineage` of a run whose rollouts a what-if trains too: each run has its own rows."""

from pathlib import Path

from rollstream.schemas import events
from rollstream.schemas.base import Event
from tests.metrics.conftest import SyntheticRun, answers

WHAT_IF = "demo-what-if-000002"
TRAINING = (events.BatchPlanned, events.StepTrained, events.WeightsPublished)


def what_if_of(run: SyntheticRun, found: list[Event], *, epoch: int) -> list[Event]:
    """A run that trains what an RL epoch of another one trained."""
    moved: list[Event] = []
    for event in found:
        of_epoch = getattr(event, "batch_id", None) == f"{run.run_id}/rl/b{epoch:06d}"
        if isinstance(event, TRAINING) and of_epoch:
            names = {name: str(getattr(event, name)) for name in ("job_id", "model_group", "batch_id")}
            changes = {name: value.replace(run.run_id, WHAT_IF) for name, value in names.items()}
            moved.append(event.model_copy(update={"run_id": WHAT_IF, **changes}))
    assert [type(event) for event in moved] == list(TRAINING)
    return moved


def test_a_step_that_a_what_if_trains_too_is_a_row_of_each_run(tmp_path: Path, synthetic: SyntheticRun) -> None:
    made = list(synthetic.all_events())
    own = f"SELECT * FROM lineage WHERE run_id = '{synthetic.run_id}' ORDER BY ALL"
    (alone,) = answers(tmp_path, made, own)
    counted = (
        "SELECT run_id, job_id, model_group, training_step, version, count(*), count(DISTINCT rollout_id) FROM lineage "
        "WHERE batch_id IS NOT NULL GROUP BY ALL ORDER BY ALL"
    )
    both, found = answers(tmp_path, [*made, *what_if_of(synthetic, made, epoch=1)], own, counted)
    assert both == alone
    run = synthetic.run_id
    assert found == [  # of an epoch two groups of four members with two steps are trained
        (run, f"{run}/rl", f"{run}/policy", 2, 2, 16, 8),
        (run, f"{run}/rl", f"{run}/policy", 3, 3, 16, 8),
        (run, f"{run}/sft", f"{run}/policy", 1, 1, 16, 8),
        (WHAT_IF, f"{WHAT_IF}/rl", f"{WHAT_IF}/policy", 3, 3, 16, 8),
    ]


def test_a_step_that_only_a_what_if_trains_keeps_a_row_of_its_own_run(tmp_path: Path, synthetic: SyntheticRun) -> None:
    made = list(synthetic.all_events())
    trained = what_if_of(synthetic, made, epoch=1)
    untrained = [event for event in made if not isinstance(event, TRAINING)]
    (found,) = answers(
        tmp_path,
        [*untrained, *trained],
        "SELECT run_id, batch_id, job_id, training_step, count(*) FROM lineage GROUP BY ALL ORDER BY ALL",
    )
    num_steps = 9 * 8 + 3
    assert found == [
        (synthetic.run_id, None, None, None, num_steps),
        (WHAT_IF, f"{WHAT_IF}/rl/b000001", f"{WHAT_IF}/rl", 3, 16),
    ]
