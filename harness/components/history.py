"""The files of an epochwise run in output_dir, named as in NAT: metrics, histories, curriculum, a plot.

An epoch appends a line or an element; only a repeated epoch rewrites files, through a temporary file and a rename.
Files that an earlier process of the same run wrote are continued, never lost.
"""

import io
import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from rollstream.eventlog.disk_space import is_full
from rollstream.eventlog.files import replacing
from rollstream.harness.runs.earlier_output import CURRICULUM, METRICS, PLOT, REWARDS, VALIDATIONS

PLOT_EVERY_S = 1.0
"""Drawing takes a tenth of a second: short epochs are not drawn one by one."""
PLOT_REST = 20
"""Minimum pause between two plots, in multiples of the time that the last one took."""
RUN = "run_id"
LIST_END = b"\n]\n"
ELEMENT_END = "\n  }"
HISTORY_KEYS = (
    "timestamp",
    "avg_reward",
    "min_reward",
    "max_reward",
    "num_trajectories",
    "num_groups",
    "filtered_avg_reward",
    "curriculum_percentile",
)

logger = logging.getLogger(__name__)


class EpochFiles:
    """Histories of one run, in memory and in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.expanduser(folder))  # that of NAT's own harness may begin with ~
        self.rewards: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self._metrics: Path | None = None
        """The file that holds no other lines than those of `rewards`' epochs, beside a history of all of them."""
        self._validations: Path | None = None
        self._is_plot_behind = False
        self._next_plot_s = time.monotonic() + PLOT_EVERY_S

    def resume(self, run_id: str, first_epoch: int) -> None:
        """Load this run's history of the epochs before `first_epoch`; files of other runs are replaced."""
        self.rewards = [_history(row) for row in self._rows(self.folder / METRICS, run_id, first_epoch)]
        validations = [row for row in _read(self.folder / VALIDATIONS) if row.get("epoch", -1) < first_epoch]
        unnamed = run_id if self.rewards else None
        """Owner of rows that an earlier release wrote."""
        self.validations = [row for row in validations if row.get(RUN, unnamed) == run_id]
        self._is_plot_behind = bool(self.rewards or self.validations)

    @contextmanager
    def in_folder(self, folder: Path | None) -> Iterator[None]:
        """Write files to another folder (None: the same) within this context; those of this folder stay unchanged. As
        in NAT, an epoch's line is then only in the other folder's metrics, its element in the histories of both.
        """
        home, self.folder = self.folder, folder or self.folder
        if self.folder != home:
            self._metrics = None  # each folder's files lack the other's entries
        try:
            yield
        finally:
            if self.folder != home:
                self._metrics = None
            self.folder = home

    def add_epoch(self, run_id: str, epoch: int, metrics: Mapping[str, Any], curriculum: Mapping[str, Any]) -> None:
        """Record an epoch, replacing an earlier record of it; the plot is drawn at intervals.

        Raises OSError. After a full disk the call can be repeated and leaves every file complete.
        """
        row = {"epoch": epoch, "timestamp": _now(), RUN: run_id, **metrics, "curriculum_state": dict(curriculum)}
        line = (json.dumps(_plain(row)) + "\n").encode()
        path, history = self.folder / METRICS, _history(row)
        if self._metrics == path and epoch > self.rewards[-1]["epoch"]:
            _append_line(path, line)
            self.rewards.append(history)
            if not _append(self.folder / REWARDS, history):
                _write(self.folder / REWARDS, [_json(self.rewards)])
        else:
            self.rewards = [*(old for old in self.rewards if old["epoch"] != epoch), history]
            kept = {old["epoch"] for old in self.rewards[:-1]}
            earlier = self._rows(self._metrics or path, run_id, None)
            lines = ((json.dumps(one) + "\n").encode() for one in earlier if one["epoch"] in kept)
            _write(path, chain(lines, [line]))
            _write(self.folder / REWARDS, [_json(self.rewards)])
            self._metrics = path
        _write(self.folder / CURRICULUM, [_json(dict(curriculum))])
        self._is_plot_behind = True
        if time.monotonic() >= self._next_plot_s:
            self._plot_if_disk_allows(run_id)

    def finish(self, run_id: str) -> None:
        """Draw the epochs and validations that are not drawn yet. Raises OSError; the call can then be repeated."""
        if self._is_plot_behind:
            self.plot(run_id)

    def add_validation(self, run_id: str, epoch: int, result: Mapping[str, Any]) -> None:
        """Record a validation, or the reason why it failed. Raises OSError like `add_epoch`."""
        row, path = {"epoch": epoch, "timestamp": _now(), RUN: run_id, **result}, self.folder / VALIDATIONS
        is_next = self._validations == path and epoch > self.validations[-1]["epoch"]
        self.validations = [*(old for old in self.validations if old["epoch"] != epoch), row]
        if not is_next or not _append(path, row):
            _write(path, [_json(self.validations)])
        self._validations = path
        self._is_plot_behind = True

    @staticmethod
    def _rows(path: Path, run_id: str, first_epoch: int | None) -> Iterator[dict[str, Any]]:
        """Rows of a run's epochs (before `first_epoch`), one by one: a row names every admitted example."""
        for row in _read_lines(path):
            epoch = row.get("epoch", -1)
            if row.get(RUN) == run_id and (first_epoch is None or epoch < first_epoch):
                yield row

    def _plot_if_disk_allows(self, run_id: str) -> None:
        """Draw the plot; on a full disk, defer it to the next epoch or the end."""
        try:
            self.plot(run_id)
        except OSError as error:
            if not is_full(error):
                raise
            logger.warning("%s was not drawn and will be retried: %s", self.folder / PLOT, error)

    def plot(self, run_id: str) -> None:
        """Plot rewards before and after the curriculum, validations, and the curriculum's percentile."""
        from rollstream.metrics.plot import draw_percentile, reward_axes

        if not self.rewards:
            return
        began = time.monotonic()
        figure, axes = reward_axes(run_id, dpi=110)
        figure.subplots_adjust(left=0.08, right=0.92, top=0.93, bottom=0.17)  # computing margins doubles the time
        numbers = [row["epoch"] for row in self.rewards]
        axes.plot(numbers, _column(self.rewards, "avg_reward"), marker="o", label="mean reward")
        axes.plot(numbers, _column(self.rewards, "filtered_avg_reward"), marker=".", label="mean reward, trained")
        valid = [row for row in self.validations if row.get("avg_reward") is not None]
        if valid:
            axes.plot([row["epoch"] for row in valid], _column(valid, "avg_reward"), marker="s", label="validation")
        draw_percentile(axes, numbers, _column(self.rewards, "curriculum_percentile"), "groups", "tab:gray")
        figure.legend(loc="lower center", ncols=4, frameon=False)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
        _write(self.folder / PLOT, [drawn.getbuffer()])
        self._is_plot_behind = False
        now = time.monotonic()
        self._next_plot_s = now + max(PLOT_EVERY_S, PLOT_REST * (now - began))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


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


def _history(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"epoch": row["epoch"], **{key: row[key] for key in HISTORY_KEYS if key in row}}


def _json(value: Any) -> bytes:
    return (json.dumps(_plain(value), indent=2) + "\n").encode()


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    with replacing(path, is_synced=False, is_private=False) as file:
        file.writelines(parts)


def _append_line(path: Path, line: bytes) -> None:
    """Append a complete line or nothing, after any line that a crash cut off."""
    with path.open("a+b", buffering=0) as file:
        size = file.tell()
        file.seek(max(0, size - 1))
        left = memoryview(line if file.read(1) in (b"", b"\n") else b"\n" + line)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(size)
            raise


def _append(path: Path, row: Mapping[str, Any]) -> bool:
    """Append an element to the JSON list in a file with one write; False if the file was not written by `_json`."""
    element = _json([row])[1 : -len(LIST_END)]
    try:
        with path.open("r+b") as file:
            file.seek(-len(LIST_END), os.SEEK_END)
            if file.read() != LIST_END:
                return False
            file.seek(-len(LIST_END), os.SEEK_END)
            file.write(b"," + element + LIST_END)
    except OSError:
        return False
    return True


def _read(path: Path) -> list[dict[str, Any]]:
    """The elements of a list; if a crash cut the file off, those before the cut."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return []
    for candidate in (text, text[: text.rfind(ELEMENT_END) + len(ELEMENT_END)] + LIST_END.decode()):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    return []


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows, one by one; a line that a crash cut off is skipped."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row
    except FileNotFoundError:
        return
