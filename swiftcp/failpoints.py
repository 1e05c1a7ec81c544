"""Named places where a test can kill the process, to prove that a crash there loses nothing.

`SWIFTCP_FAILPOINT=checkpoint.shard_written:3` ends the process as `kill -9` does when it passes that place the third time
(the first, without a number). Unset, a failpoint is one look-up in the environment.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "SWIFTCP_FAILPOINT"

_passes: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Die here if `SWIFTCP_FAILPOINT` says so."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    wanted_name, _, wanted_pass = wanted.partition(":")
    if wanted_name != name:
        return
    _passes[name] += 1
    if _passes[name] == int(wanted_pass or 1):
        os.kill(os.getpid(), signal.SIGKILL)
