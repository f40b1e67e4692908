"""What a component raises, told as one line: whose it is, what it says, and where in its code."""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollstream.harness.interfaces import Trainer, TrainerAdapter, TrajectoryBuilder
from rollstream.schemas.errors import ComponentError, RollstreamError
from rollstream.schemas.finetuning import FinetuneConfig

_ROLES = {Trainer: "trainer", TrajectoryBuilder: "trajectory_builder", TrainerAdapter: "trainer_adapter"}
logger = logging.getLogger(__name__)


@contextmanager
def told(place: str, finetune: FinetuneConfig | None = None) -> Iterator[None]:
    """Whatever is raised within, errors of ours aside, is a ComponentError; its traceback goes into the log.

    `place`: the block that is to blame; with `finetune`, that of the component which raised, where it can be told.
    """
    try:
        yield
    except RollstreamError:
        raise
    except Exception as error:
        logger.info("a component raised", exc_info=error)
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ComponentError(
            f"{_place(finetune, error) or place}: {type(error).__name__}: {error} "
            f"({Path(at.filename).name} line {at.lineno}, in {at.name}); rollstream --debug shows how it came there"
        ) from error


def _place(finetune: FinetuneConfig | None, error: BaseException) -> str | None:
    """The block of the innermost component whose method was called."""
    found, step = None, error.__traceback__
    while finetune is not None and step is not None:
        for kind, role in _ROLES.items():
            if isinstance(step.tb_frame.f_locals.get("self"), kind):
                found = f"{role}s.{getattr(finetune, role)}"
        step = step.tb_next
    return found
