"""One stage of `swiftcp parity` in a rank process: `python -m swiftcp.trainers.parity_worker TASK.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from swiftcp.errors import SwiftcpError
from swiftcp.rank import prepare_rank, set_up_logging


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: what is wrong with the recipe or the data is told as the command line tells it."""
    set_up_logging(informs=False)
    task = json.loads(Path(arguments[0]).read_text())
    prepare_rank(task["config"]["device"])
    from swiftcp.trainers.parity_stages import run_stage

    try:
        run_stage(task)
    except SwiftcpError as error:
        print(f"swiftcp: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
