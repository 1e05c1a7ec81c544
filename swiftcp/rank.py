"""What a process does before it becomes a rank, and so before anything imports torch or megatron-core."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from swiftcp.parallel.engine import hide_broken_transformer_engine


def prepare_rank(device: str) -> None:
    """What a rank process does before anything imports torch or megatron-core."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # megatron-core works on a GPU wherever torch finds one
    hide_broken_transformer_engine()


def set_up_logging(*, informs: bool) -> None:
    """What this project says is shown, of other packages what matters: megatron-core and torch tell much at each start."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("swiftcp").setLevel(logging.INFO if informs else logging.WARNING)
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|torch|transformers)\b")
