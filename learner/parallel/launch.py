"""Starts the processes of a learner by torchrun. The module itself needs no model library but torch."""

import logging
import os
import tempfile
from collections.abc import Sequence

from rollstream.schemas.errors import RunFailedError


def is_started_together() -> bool:
    """Whether torchrun started this process among others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


class ProcessFailedError(RunFailedError):
    """One of the processes failed; all have ended."""

    def __init__(self, rank: int, num: int, status: int) -> None:
        """`status`: of its exit; negative if a signal ended it."""
        super().__init__(f"process {rank} of {num} ended with status {status}; its last messages say why")
        self.rank, self.status = rank, status


def start_processes(num: int, module: str, arguments: Sequence[str]) -> bool:
    """Run `python -m MODULE ARGUMENTS` in `num` processes of this machine by torchrun. False if a signal stopped them.

    To be called in the main thread. Raises ProcessFailedError.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num)))
    quiet = logging.getLogger("torch.distributed.elastic")  # what the processes log themselves should be the last words
    quiet.propagate = False
    quiet.addHandler(logging.NullHandler())
    with tempfile.TemporaryDirectory(prefix="rollstream-ranks-") as folder:
        options = ["--nnodes", "1", "--nproc-per-node", str(num), "--max-restarts", "0", "--log-dir", folder]
        options += ["--standalone", "--local-addr", "127.0.0.1", "--module", module]
        try:
            run.run(run.parse_args([*options, *arguments]))
        except SignalException:
            return False
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise ProcessFailedError(rank, num, failure.exitcode) from None
    return True
