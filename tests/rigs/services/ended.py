"""Whether a process has ended, whoever is its parent."""

import psutil


def is_gone(pid: int) -> bool:
    """Also once another thread of the interpreter has reaped it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
