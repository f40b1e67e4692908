"""The files that the classic way leaves in output_dir, in NAT's names: metrics, histories, curriculum, a plot.

Written aside and moved into place. What an earlier process of the same run wrote is continued, never lost.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

METRICS = "training_metrics.jsonl"
REWARDS = "reward_history.json"
VALIDATIONS = "validation_history.json"
CURRICULUM = "curriculum_state.json"
PLOT = "reward_plot.png"
PLOT_EVERY_S = 1.0
"""Drawing takes a tenth of a second: short epochs are not drawn one by one."""
RUN = "run_id"
HISTORY_KEYS = (
    "avg_reward",
    "min_reward",
    "max_reward",
    "num_trajectories",
    "num_groups",
    "filtered_avg_reward",
    "curriculum_percentile",
)


class ClassicFiles:
    """Histories of one run, in memory and in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rewards: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self._is_plot_behind = False
        self._plotted_s = time.monotonic()

    def resume(self, run_id: str, first_epoch: int) -> None:
        """Take up what this run has left here of the epochs before `first_epoch`; that of other runs is replaced."""
        self.metrics = [row for row in _read_lines(self.folder / METRICS) if row.get(RUN) == run_id]
        self.metrics = [row for row in self.metrics if row.get("epoch", -1) < first_epoch]
        if not self.metrics:
            return
        self._is_plot_behind = True
        self.rewards = [row for row in _read(self.folder / REWARDS) if row.get("epoch", -1) < first_epoch]
        self.validations = [row for row in _read(self.folder / VALIDATIONS) if row.get("epoch", -1) < first_epoch]

    def add_epoch(self, run_id: str, epoch: int, metrics: Mapping[str, Any], curriculum: Mapping[str, Any]) -> None:
        """Note an epoch, again if it is done again, and write all files; the plot at most once a second."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        row = {"epoch": epoch, "timestamp": now, RUN: run_id, **metrics, "curriculum_state": dict(curriculum)}
        self.metrics = [*(old for old in self.metrics if old["epoch"] != epoch), row]
        history = {"epoch": epoch, **{key: metrics[key] for key in HISTORY_KEYS if key in metrics}}
        self.rewards = [*(old for old in self.rewards if old["epoch"] != epoch), history]
        lines = "".join(json.dumps(_plain(one)) + "\n" for one in self.metrics)
        _write(self.folder / METRICS, lines.encode())
        _write(self.folder / REWARDS, _json(self.rewards))
        _write(self.folder / CURRICULUM, _json(dict(curriculum)))
        self._is_plot_behind = True
        if time.monotonic() - self._plotted_s >= PLOT_EVERY_S:
            self.plot(run_id)

    def finish(self, run_id: str) -> None:
        """Draw the epochs and validations that are not drawn yet."""
        if self._is_plot_behind:
            self.plot(run_id)

    def add_validation(self, epoch: int, result: Mapping[str, Any]) -> None:
        """Note a validation, or the reason why it failed."""
        self.validations = [*(old for old in self.validations if old["epoch"] != epoch), {"epoch": epoch, **result}]
        _write(self.folder / VALIDATIONS, _json(self.validations))
        self._is_plot_behind = True

    def plot(self, run_id: str) -> None:
        """Draw rewards before and after the curriculum, validations, and how far the curriculum is open."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        if not self.rewards:
            return
        figure = Figure(figsize=(9, 5), dpi=110)
        figure.subplots_adjust(left=0.08, right=0.92, top=0.93, bottom=0.17)  # to work margins out takes twice the time
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        numbers = [row["epoch"] for row in self.rewards]
        axes.plot(numbers, _column(self.rewards, "avg_reward"), marker="o", label="mean reward")
        axes.plot(numbers, _column(self.rewards, "filtered_avg_reward"), marker=".", label="mean reward, trained")
        valid = [row for row in self.validations if row.get("avg_reward") is not None]
        if valid:
            axes.plot([row["epoch"] for row in valid], _column(valid, "avg_reward"), marker="s", label="validation")
        axes.set(title=f"Reward by epoch: run {run_id}", xlabel="epoch", ylabel="reward")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
        shares = [100 * share for share in _column(self.rewards, "curriculum_percentile")]
        second = axes.twinx()
        second.step(numbers, shares, where="post", color="tab:gray", linestyle="--", label="curriculum percentile")
        second.set(ylabel="curriculum percentile (% of groups)", ylim=(0, 105))
        figure.legend(loc="lower center", ncols=4, frameon=False)
        temporary = self.folder / f".{PLOT}"
        figure.savefig(temporary, format="png")
        temporary.replace(self.folder / PLOT)
        self._is_plot_behind = False
        self._plotted_s = time.monotonic()


def _column(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [math.nan if row.get(key) is None else float(row[key]) for row in rows]


def _plain(value: Any) -> Any:
    """JSON has no NaN, no infinity and no sets."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | bool | None) else str(value)


def _json(value: Any) -> bytes:
    return (json.dumps(_plain(value), indent=2) + "\n").encode()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(data)
    temporary.replace(path)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    except (FileNotFoundError, ValueError):
        return []
