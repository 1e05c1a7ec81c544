"""Transformer Engine absent, and present but unusable: a clear message or a working fallback, never a traceback from an import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swiftcp.errors import ConfigError
from swiftcp.parallel import engine
from swiftcp.parallel.layer_specs import select_backend

BROKEN = 'raise OSError("/lib/libc.so.6: version GLIBC_2.38 not found")'


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    engine._import_problem.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engine, "PACKAGE", "engine_for_a_test")
    monkeypatch.delitem(sys.modules, "engine_for_a_test", raising=False)


def write_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str = "engine_for_a_test") -> None:
    (folder / name / "pytorch").mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)
    (folder / name / "pytorch" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))


def test_an_absent_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"is te, but transformer-engine is not installed .*use attention_backend torch"):
        select_backend("te")
    assert select_backend("auto") == "torch"


def test_a_broken_engine_is_told_and_auto_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_engine(tmp_path, monkeypatch, BROKEN)
    with pytest.raises(ConfigError, match=r"does not import: OSError: .*GLIBC_2.38 not found"):
        select_backend("te")
    assert select_backend("auto") == "torch"


def test_a_working_engine_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_engine(tmp_path, monkeypatch, "")
    assert select_backend("auto") == select_backend("te") == "te"
    engine.hide_broken_transformer_engine()
    assert sys.modules["engine_for_a_test"] is not None


def test_without_a_device_the_engine_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert engine.transformer_engine_problem() == "there is no CUDA device"


def test_the_trainer_imports_beside_a_broken_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_engine(tmp_path, monkeypatch, BROKEN, name="transformer_engine")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from swiftcp.parallel.engine import hide_broken_transformer_engine
hide_broken_transformer_engine()
import swiftcp.trainers.sft
from megatron.core.extensions import transformer_engine
print("imported with", transformer_engine.HAVE_TE)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout.strip() == "imported with False", result.stderr[-2000:]
