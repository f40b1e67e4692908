"""A child's tie to the process that started it: when the parent is gone, however it went, the child is killed.

The child ties itself, so that the parent need not fork by hand. On other systems than Linux it only checks once.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

PARENT = "ROLLSTREAM_PARENT"
"""Environment variable with the parent's process id; set for children only."""
PR_SET_PDEATHSIG = 1


def tie_to_parent(environ: Mapping[str, str]) -> None:
    """Die with the parent that the environment names; exits at once if it is gone already."""
    parent = environ.get(PARENT)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(1)
