"""What `.importlinter` cannot see: what an import really loads, what it changes, and who touches megatron-core's global state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swiftcp.errors import ConfigError

PACKAGE = Path(__file__).parents[2] / "swiftcp"
LIGHT = (
    "swiftcp",
    "swiftcp.cli",
    "swiftcp.config",
    "swiftcp.errors",
    "swiftcp.launch",
    "swiftcp.run",
    "swiftcp.topology",
    "swiftcp.doctor",
)
HEAVY = {"torch", "transformers", "megatron", "datasets"}


@pytest.mark.parametrize("module", LIGHT)
def test_import_is_light(module: str) -> None:
    code = f"import sys, {module}; print(sorted({HEAVY} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    assert loaded.strip() == "[]"


def test_configuration_and_models_know_the_same_families() -> None:
    from swiftcp.config.facts import SUPPORTED_MODEL_TYPES
    from swiftcp.models.registry import family_of

    assert all(model_type.startswith(family_of(model_type).model_type) for model_type in SUPPORTED_MODEL_TYPES)
    with pytest.raises(ConfigError) as caught:
        family_of("llama")
    assert str(caught.value).endswith(f"use a checkpoint of one of {', '.join(sorted(SUPPORTED_MODEL_TYPES))}")


def test_only_the_mesh_touches_parallel_state() -> None:
    users = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if "parallel_state" in path.read_text(encoding="utf-8")}
    assert users == {"parallel/mesh.py"}
