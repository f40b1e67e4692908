"""Plots a run: mean reward by epoch with its standard deviation, a moving mean, and the curriculum's percentile."""

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rollstream.schemas import ids
from rollstream.schemas.errors import QueryError

if TYPE_CHECKING:
    from rollstream.metrics.sql.result import Result

WINDOW_EPOCHS = 5
"""Number of epochs in the moving mean."""


def plot_run(workspace: Path, run_id: str, path: Path, *, fresh: bool = True) -> Path:
    """Write an image of a run's RL epochs. `fresh`: first wait for all that is in the log now.

    `path`: its suffix says the format; without one it is PNG. Raises QueryError for another suffix, and if the run is
    not known or has no epoch with a reward.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    image_format, known = path.suffix[1:].lower() or "png", FigureCanvasAgg.get_supported_filetypes()
    if image_format not in known:
        raise QueryError(f"-o {path}: {path.suffix} is not a format of images; use one of: {', '.join(sorted(known))}")
    figure = reward_figure(epochs_with_reward(workspace, run_id, fresh=fresh), run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format=image_format)
    return path


def epochs_with_reward(workspace: Path, run_id: str, *, fresh: bool) -> "Result":
    """Job, epoch, mean reward, its standard deviation and the curriculum percentile, in the order of training.

    Raises QueryError as `plot_run` does.
    """
    from rollstream.metrics.projection.columns import quoted
    from rollstream.metrics.sql.client import check_run, query

    sql = (
        "SELECT job_id, epoch, avg_reward, coalesce(reward_std, 0), curriculum_percentile FROM epoch_summary "
        f"WHERE run_id = {quoted(run_id)} AND avg_reward IS NOT NULL "
        "ORDER BY min(started_at) OVER (PARTITION BY job_id), job_id, epoch"
    )
    epochs = query(workspace, sql, fresh=fresh, limit=100_000)
    if epochs.rows:
        return epochs
    check_run(workspace, run_id, fresh=False)
    raise QueryError(f"run {run_id} has no RL epoch with a reward yet; repeat this once one has ended")


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


def draw_percentile(
    axes: Any,
    epochs: Sequence[int],
    shares: Sequence[float | None],
    of: str,
    color: str,
    *,
    prefix: str = "",
    second: Any = None,
) -> Any:
    """Draw the curriculum percentile on an axis of its own at the right, and return that axis.

    `shares` are from 0 to 1; `of` names their whole. `second`: the axis that another line has already.
    """
    is_first = second is None
    second = axes.twinx() if is_first else second
    percentages = [math.nan if share is None else 100 * share for share in shares]
    label = f"{prefix}curriculum percentile"
    second.step(epochs, percentages, where="post", color=color, linestyle="--", label=label)
    axis_color = color if is_first else "black"
    second.set_ylabel(f"curriculum percentile (% of {of})", color=axis_color)
    second.set_ylim(0, 105)
    second.tick_params(axis="y", colors=axis_color)
    return second


class _JobEpochs(NamedTuple):
    """Epochs of a job that have a reward, in order."""

    job_id: str
    epochs: list[int]
    means: list[float]
    deviations: list[float]
    percentiles: list[float | None]

    @property
    def has_percentile(self) -> bool:
        """Whether the job has a curriculum."""
        return any(percentile is not None for percentile in self.percentiles)


def reward_figure(epochs: "Result", run_id: str) -> Any:
    """Matplotlib's figure of `epochs_with_reward`; each job has a line, for several may go through the same epochs."""
    jobs = [
        _JobEpochs(job_id, *(list(column) for column in zip(*(row[1:] for row in rows), strict=True)))
        for job_id, rows in groupby(epochs.rows, key=itemgetter(0))
    ]
    figure, axes = reward_axes(run_id, dpi=130, layout="constrained")
    second: Any = None
    for number, job in enumerate(jobs):
        own = f"C{number}"
        colors = ("tab:blue", "tab:red", "tab:green") if len(jobs) == 1 else (own, own, own)
        prefix = "" if len(jobs) == 1 else f"{ids.name_of(job.job_id)}: "
        _draw_job(axes, job, prefix, colors)
        if job.has_percentile:
            second = draw_percentile(
                axes, job.epochs, job.percentiles, "examples", colors[2], prefix=prefix, second=second
            )
    handles, labels = axes.get_legend_handles_labels()
    if second is not None:
        more, names = second.get_legend_handles_labels()
        handles, labels = handles + more, labels + names
    ncols = len(labels) if len(jobs) == 1 else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False)
    return figure


def _draw_job(axes: Any, job: _JobEpochs, prefix: str, colors: tuple[str, str, str]) -> None:
    low = [mean - deviation for mean, deviation in zip(job.means, job.deviations, strict=True)]
    high = [mean + deviation for mean, deviation in zip(job.means, job.deviations, strict=True)]
    label = f"{prefix}±1 standard deviation"
    axes.fill_between(job.epochs, low, high, color=colors[0], alpha=0.15, linewidth=0, label=label)
    label = f"{prefix}mean reward"
    axes.plot(job.epochs, job.means, color=colors[0], marker="o", markersize=4, linewidth=1.2, label=label)
    if len(job.means) > 2:
        label = f"{prefix}moving mean of {WINDOW_EPOCHS} epochs"
        axes.plot(job.epochs, moving_mean(job.means), color=colors[1], linewidth=2, label=label)
