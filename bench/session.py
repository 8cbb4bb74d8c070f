"""Gives the bench a fair share of the cores on a machine that others use too.

Linux shares cores first among sessions and only then among their processes, so `nice` does nothing against a busy
neighbour; the weight of the own session can be raised where the process may. The bench then runs in a session of its
own, which leaves every other process as it was. Where any of this is not offered, the bench runs as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

_WEIGHT = "-18"
_AUTOGROUP = Path("/proc/self/autogroup")


def enter_own_session() -> None:
    """Goes on in a child process with a heavier session; the parent passes signals on and returns its exit status.

    To be called before threads exist. Returns in the process that is to do the work.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or not os.access(_AUTOGROUP, os.W_OK):
        return
    child = os.fork()
    if child == 0:
        os.setsid()
        end_with_parent()
        with contextlib.suppress(OSError):
            _AUTOGROUP.write_text(_WEIGHT)
        return

    def pass_on(number: int, _: Any) -> None:
        os.killpg(child, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    status = os.waitpid(child, 0)[1]
    # Not sys.exit: nothing of this process is to be cleaned up twice.
    sys.stdout.flush()
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def end_with_parent() -> None:
    """Ends this process when its parent is killed, where Linux can be asked to."""
    pr_set_pdeathsig = 1
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl:
        prctl(pr_set_pdeathsig, signal.SIGKILL)
