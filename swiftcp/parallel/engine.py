"""Whether Transformer Engine can be used in this process. Imports nothing of megatron-core, which imports it where it can."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache

PACKAGE = "transformer_engine"


@cache
def _import_problem() -> str | None:
    if importlib.util.find_spec(PACKAGE) is None:
        return "transformer-engine is not installed (pip install 'swiftcp[te]')"
    try:
        importlib.import_module(f"{PACKAGE}.pytorch")
    except Exception as error:  # a wrong libc, cuDNN or torch shows as anything from ImportError to RuntimeError
        return f"transformer-engine does not import: {type(error).__name__}: {error}"
    return None


def transformer_engine_problem() -> str | None:
    """Why Transformer Engine cannot be used in this process, or None if it can."""
    import torch

    return _import_problem() if torch.cuda.is_available() else "there is no CUDA device"


def hide_broken_transformer_engine() -> None:
    """Make an engine that is installed but does not import look as if it were not installed.

    megatron-core (0.19) goes on without Transformer Engine only where its import ends in an ImportError; a library that does not
    load ends in an OSError. Call it before anything imports megatron-core.
    """
    if importlib.util.find_spec(PACKAGE) is None or _import_problem() is None:
        return
    for name in [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
        del sys.modules[name]
    sys.modules[PACKAGE] = None  # type: ignore[assignment]
