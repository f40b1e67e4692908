"""Takes from this process the right to change files, except below one folder. It needs no privilege (landlock(7)).

Files that are open for writing already are not affected: close them first.
"""

import ctypes
import os
import sys
from pathlib import Path

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, the same on all platforms that Python runs on."""
GET_VERSION = 1
RULE_PATH_BENEATH = 1
PR_SET_NO_NEW_PRIVS = 38
WRITE_FILE = 1 << 1
REMOVE_AND_MAKE = 0b1_1111_1111 << 4
"""Folders, files, sockets, pipes, devices and symbolic links."""
REFER = 1 << 13
TRUNCATE = 1 << 14
TRUNCATE_VERSION = 3
"""Before it, a file could be cut off by whoever may write it; so that is not called confined."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def write_only_below(folder: Path) -> bool:
    """Whether it is so from here on, for this process and its children; False if the kernel cannot (Linux 6.2)."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), GET_VERSION) < TRUNCATE_VERSION:
        return False
    rights = WRITE_FILE | REMOVE_AND_MAKE | REFER | TRUNCATE
    asked = _Ruleset(rights)
    ruleset = libc.syscall(CREATE_RULESET, ctypes.byref(asked), ctypes.c_size_t(ctypes.sizeof(asked)), 0)
    if ruleset < 0:
        return False
    below = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        rule = _PathBeneath(rights, below)
        return (
            libc.syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, ctypes.byref(rule), 0) == 0
            and libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            and libc.syscall(RESTRICT_SELF, ruleset, 0) == 0
        )
    finally:
        os.close(below)
        os.close(ruleset)
