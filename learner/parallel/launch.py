"""Starts the processes of a learner by torchrun. The process that does so loads no model library but torch."""

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence

from rollstream.schemas.errors import RunFailedError


def is_started_together(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process among others."""
    return int(env.get("WORLD_SIZE", "1")) > 1


def start_processes(num: int, module: str, arguments: Sequence[str]) -> None:
    """Run `python -m MODULE ARGUMENTS` in `num` processes of this machine by torchrun, until a signal stops them all.

    To be called in the main thread. Raises RunFailedError if one of them fails; then all of them have ended.
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
            return
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise RunFailedError(
                f"process {rank} of {num} ended with status {failure.exitcode}; its last messages say why"
            ) from None
