"""Plots a run: mean reward by epoch with its standard deviation, a moving mean, and the curriculum's percentile."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollstream.schemas import ids
from rollstream.schemas.errors import QueryError

if TYPE_CHECKING:
    from rollstream.metrics.sql.result import Result

WINDOW_EPOCHS = 5
"""Number of epochs in the moving mean."""


def plot_run(workspace: Path, run_id: str, path: Path, *, fresh: bool = True) -> Path:
    """Write a PNG of a run's RL epochs. `fresh`: first wait for all that is in the log now.

    Raises QueryError if the run is not known or has no epoch with a reward.
    """
    from rollstream.metrics.sql.client import query

    name = run_id.replace("'", "''")
    sql = (
        "SELECT job_id, avg_reward, coalesce(reward_std, 0), curriculum_percentile FROM epoch_summary "
        f"WHERE run_id = '{name}' AND avg_reward IS NOT NULL"
    )
    epochs = query(workspace, sql, fresh=fresh, limit=100_000)
    if not epochs.rows:
        known = [row[0] for row in query(workspace, "SELECT run_id FROM runs", limit=1000).rows]
        why = (
            "has no RL epoch with a reward yet; repeat this once one has ended"
            if run_id in known
            else f"does not exist; known runs: {', '.join(known)}"
        )
        raise QueryError(f"run {run_id} {why}")
    _draw(epochs, run_id, path)
    return path


def moving_mean(values: Sequence[float], window: int = WINDOW_EPOCHS) -> list[float]:
    """Mean of each value and those before it, at most `window` of them."""
    return [sum(values[max(0, end - window) : end]) / (end - max(0, end - window)) for end in range(1, len(values) + 1)]


def reward_axes(run_id: str, *, dpi: int, layout: Literal["constrained"] | None = None) -> tuple[Any, Any]:
    """Figure and axes (matplotlib's) for a run's rewards by epoch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 5), dpi=dpi, layout=layout)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(title=f"Reward by epoch: run {run_id}", xlabel="epoch", ylabel="reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    return figure, axes


def draw_percentile(axes: Any, epochs: Sequence[int], shares: Sequence[float | None], of: str, color: str) -> Any:
    """Draw the curriculum percentile on an axis of its own at the right, and return that axis.

    `shares` are from 0 to 1; `of` names their whole.
    """
    second = axes.twinx()
    percentages = [math.nan if share is None else 100 * share for share in shares]
    second.step(epochs, percentages, where="post", color=color, linestyle="--", label="curriculum percentile")
    second.set_ylabel(f"curriculum percentile (% of {of})", color=color)
    second.set_ylim(0, 105)
    second.tick_params(axis="y", colors=color)
    return second


def _draw(epochs: "Result", run_id: str, path: Path) -> None:
    jobs, means, spreads, percentiles = (list(column) for column in zip(*epochs.rows, strict=True))
    numbers = list(range(len(means)))
    figure, axes = reward_axes(run_id, dpi=130, layout="constrained")
    low, high = (
        [m - s for m, s in zip(means, spreads, strict=True)],
        [m + s for m, s in zip(means, spreads, strict=True)],
    )
    axes.fill_between(numbers, low, high, color="tab:blue", alpha=0.15, linewidth=0, label="±1 standard deviation")
    axes.plot(numbers, means, color="tab:blue", marker="o", markersize=4, linewidth=1.2, label="mean reward")
    if len(means) > 2:
        label = f"moving mean of {WINDOW_EPOCHS} epochs"
        axes.plot(numbers, moving_mean(means), color="tab:red", linewidth=2, label=label)
    _mark_jobs(axes, jobs)
    handles, labels = axes.get_legend_handles_labels()
    if any(percentile is not None for percentile in percentiles):
        second = draw_percentile(axes, numbers, percentiles, "examples", "tab:green")
        more, names = second.get_legend_handles_labels()
        handles, labels = handles + more, labels + names
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _mark_jobs(axes: Any, jobs: Sequence[str]) -> None:
    """A line where a later job of the same run begins."""
    for number, (before, job) in enumerate(pairwise(jobs), start=1):
        if job != before:
            axes.axvline(number - 0.5, color="grey", linestyle=":", linewidth=1)
            axes.annotate(ids.name_of(job), (number - 0.5, 1), xycoords=("data", "axes fraction"), va="top")
