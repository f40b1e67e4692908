"""The comparison with TRL: which micro-batches it tries, and a step of each system as small as can be."""

import math
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import bench_trl
from benchmarks.trl_settings import fastest, rows_tried
from rollstream.learner.tiny_model import make_tiny_model


@pytest.mark.parametrize(
    ("kind", "num_rows", "wanted"),
    [("grpo", 64, [1, 2, 4, 8, 16, 32]), ("sft", 16, [1, 2, 4, 8, 16]), ("dpo", 64, [2, 4, 8, 16, 32])],
)
def test_each_division_of_a_step_is_tried_once(kind: str, num_rows: int, wanted: list[int]) -> None:
    assert rows_tried(kind, num_rows) == wanted
    for size, groups in bench_trl.GROUPS.items():
        assert max(rows_tried(kind, groups * bench_trl.GROUP)) <= groups * bench_trl.GROUP, size


def test_the_fastest_number_of_rows_is_chosen_and_the_smaller_of_two() -> None:
    assert fastest({32: 2.0, 16: 1.5, 1: 1.5, 8: 1.8}) == 1


@pytest.mark.slow
def test_a_pass_of_each_system_gives_seconds_and_a_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_trl, "STEPS", 1)
    folder = make_tiny_model(tmp_path / "model", max_length=256)
    texts = bench_trl.texts_of(1, "fixed")
    passes = [bench_trl.ours(str(folder), kind, texts) for kind in bench_trl.KINDS]
    passes += [bench_trl.bare(str(folder), kind, texts) for kind in bench_trl.KINDS]
    if find_spec("trl"):
        passes += [bench_trl.trl(str(folder), "sft", texts, rows) for rows in (1, 8)]
    assert all(costs["cpu_s"] > 0 and costs["peak_mib"] >= 0 for costs in passes)


def test_a_step_trains_each_answer_by_the_rules_of_new_runs(tmp_path: Path) -> None:
    folder, texts = str(make_tiny_model(tmp_path / "model", max_length=256)), bench_trl.texts_of(1, "fixed")
    metrics = {kind: bench_trl.our_step(folder, kind, texts)(0).metrics for kind in bench_trl.KINDS}
    lengths = [len(answer) + 1 for _, answers in texts for answer in answers]
    for kind, found in metrics.items():
        assert (found["tokens/sequences"], found["tokens/completion"]) == (len(lengths), sum(lengths))
        assert ("mismatch/kl" in found) == (kind == "grpo"), "only losses with ratios compare the policies"
    assert metrics["dpo"]["loss/total"] == pytest.approx(math.log(2))
    both = metrics["dpo"]["dpo/chosen_logprob"] + metrics["dpo"]["dpo/rejected_logprob"]
    assert metrics["sft"]["loss/total"] == pytest.approx(-both * len(lengths) / 2 / sum(lengths))


def test_the_command_knows_each_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_trl", "--help"])
    with pytest.raises(SystemExit, match="0"):
        bench_trl.main()
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--sizes", "--kinds", "--lengths", "--rows"))
