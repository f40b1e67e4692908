"""The curriculum of an epochwise run, and its files: an epoch adds to them, and what a crash cut off is mended."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.components.curriculum import choose
from rollstream.harness.components.history import EpochFiles
from rollstream.harness.runs.earlier_output import METRICS, REWARDS, VALIDATIONS
from rollstream.processors.curate.curriculum import CurriculumProgress
from rollstream.schemas.finetuning import Trajectory
from rollstream.schemas.settings import CurriculumSettings


def add(files: EpochFiles, epoch: int, examples: int = 3) -> None:
    included = {f"e{epoch}-example-{number}" for number in range(examples)}
    curriculum = {"current_percentile": 0.3, "included_groups": included}
    files.add_epoch("mine", epoch, {"avg_reward": epoch / 10, "curriculum_percentile": 0.3}, curriculum)


def rows(folder: Path) -> list[int]:
    return [json.loads(line)["epoch"] for line in (folder / METRICS).read_text().splitlines()]


def history(folder: Path, name: str = REWARDS) -> list[Any]:
    return [row["epoch"] for row in json.loads((folder / name).read_text())]


def test_an_epoch_adds_to_the_files_and_rewrites_none_of_them(tmp_path: Path) -> None:
    files = EpochFiles(tmp_path)
    add(files, 0)
    files.add_validation("mine", 0, {"avg_reward": 0.5})
    numbers = {name: (tmp_path / name).stat().st_ino for name in (METRICS, REWARDS, VALIDATIONS)}
    for epoch in range(1, 40):
        before = {name: (tmp_path / name).read_bytes() for name in numbers}
        add(files, epoch)
        files.add_validation("mine", epoch, {"avg_reward": 0.5})
        for name, content in before.items():
            assert (tmp_path / name).read_bytes().startswith(content.removesuffix(b"\n]\n"))
    assert numbers == {name: (tmp_path / name).stat().st_ino for name in numbers}
    assert rows(tmp_path) == history(tmp_path) == history(tmp_path, VALIDATIONS) == list(range(40))
    assert json.dumps(json.loads((tmp_path / REWARDS).read_text()), indent=2) + "\n" == (tmp_path / REWARDS).read_text()


def test_a_folder_below_the_home_folder_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    add(EpochFiles(Path("~")), 0)
    assert rows(tmp_path) == [0]


@pytest.mark.parametrize("name", [METRICS, REWARDS, VALIDATIONS])
@pytest.mark.parametrize("num_gone", [1, 2, 3, 20, 10_000])
def test_a_file_that_a_crash_cut_off_loses_at_most_its_last_epoch(tmp_path: Path, name: str, num_gone: int) -> None:
    files = EpochFiles(tmp_path)
    for epoch in range(4):
        add(files, epoch)
        files.add_validation("mine", epoch, {"avg_reward": 0.5})
    content = (tmp_path / name).read_bytes()
    last = len(content) - content.rfind(b'"epoch"') if num_gone == 10_000 else num_gone
    (tmp_path / name).write_bytes(content[:-last])
    files = EpochFiles(tmp_path)
    files.resume("mine", 3)
    assert [row["epoch"] for row in files.rewards] == [0, 1, 2]
    assert [row["epoch"] for row in files.validations] == [0, 1, 2]
    for epoch in (3, 4):
        add(files, epoch)
        files.add_validation("mine", epoch, {"avg_reward": 0.5})
    assert rows(tmp_path) == history(tmp_path) == history(tmp_path, VALIDATIONS) == list(range(5))


def test_admitted_groups_are_written_and_not_kept_in_memory(tmp_path: Path) -> None:
    files = EpochFiles(tmp_path)
    add(files, 0, 500)
    files.plot("mine")  # imports what draws
    tracemalloc.start()
    try:
        add(files, 1, 500)
        before = tracemalloc.get_traced_memory()[0]
        for epoch in range(2, 22):
            add(files, epoch, 500)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown / 20 < 10_000, "bytes an epoch"
    assert len(json.loads((tmp_path / METRICS).read_text().splitlines()[-1])["curriculum_state"]["included_groups"])


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [0, 2])
def test_files_cut_by_a_full_disk_are_complete_after_the_next_write(
    small_disk: Callable[[int], Any], num_before: int
) -> None:
    disk = small_disk(2)
    files = EpochFiles(disk.folder / "output")
    for epoch in range(num_before):
        add(files, epoch, 500)
        files.add_validation("mine", epoch, {"avg_reward": 0.5, "note": "x" * 9000})
    disk.fill()
    for call in (
        lambda: add(files, num_before, 500),
        lambda: files.add_validation("mine", num_before, {"avg_reward": 0.5, "note": "x" * 9000}),
    ):
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                call()
    if num_before:
        assert rows(files.folder) == list(range(num_before))
    disk.free()
    for epoch in range(num_before, num_before + 2):
        add(files, epoch, 500)
        files.add_validation("mine", epoch, {"avg_reward": 0.5})
    expected = list(range(num_before + 2))
    assert rows(files.folder) == history(files.folder) == history(files.folder, VALIDATIONS) == expected
    assert not list(files.folder.glob(".*"))


def test_an_epoch_that_is_done_again_replaces_its_rows(tmp_path: Path) -> None:
    files = EpochFiles(tmp_path)
    for epoch in (0, 1, 2, 1, 3):
        add(files, epoch)
        files.add_validation("mine", epoch, {"avg_reward": 0.5})
    assert sorted(rows(tmp_path)) == sorted(history(tmp_path)) == [0, 1, 2, 3]


def test_another_folder_gets_all_that_the_first_one_had(tmp_path: Path) -> None:
    files = EpochFiles(tmp_path / "one")
    add(files, 0)
    files.folder = tmp_path / "two"
    add(files, 1)
    assert rows(tmp_path / "two") == history(tmp_path / "two") == [0, 1]


def test_validations_are_continued_where_no_epoch_has_trajectories_but_not_those_of_other_runs(
    tmp_path: Path,
) -> None:
    files = EpochFiles(tmp_path)
    for epoch in (0, 1):
        files.add_validation("mine", epoch, {"avg_reward": 0.9})
    again, other = EpochFiles(tmp_path), EpochFiles(tmp_path)
    again.resume("mine", 1)
    assert [row["epoch"] for row in again.validations] == [0]
    again.add_validation("mine", 1, {"avg_reward": 0.5})
    assert [row["avg_reward"] for row in json.loads((tmp_path / VALIDATIONS).read_text())] == [0.9, 0.5]
    other.resume("other", 2)
    assert other.validations == []


def test_the_curriculum_compares_trajectories_of_the_same_agent() -> None:
    def trajectory(agent: str, reward: float) -> Trajectory:
        return Trajectory(episode=[], reward=reward, metadata={"agent": agent})

    always = [trajectory("x", 1.0), trajectory("o", 0.0)] * 2
    in_turn = [trajectory(agent, reward) for reward in (0.0, 1.0) for agent in ("x", "o")]
    nameless = [Trajectory(episode=[], reward=reward) for reward in (0.0, 1.0)]
    on = CurriculumSettings(enabled=True, initial_percentile=1.0)
    _, chosen = choose([always, in_turn, nameless], on, CurriculumProgress(1.0), 0, seed=1)
    assert {index for index, _ in chosen} == {1, 2}
