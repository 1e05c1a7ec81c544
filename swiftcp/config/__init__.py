"""Configuration: what can be set, where values come from, and which of them fit together. Imports nothing heavy."""

from __future__ import annotations

from swiftcp.config.checks import validate
from swiftcp.config.concerns import Concern, LogprobsConfig, ParityConfig, TrainConfig
from swiftcp.config.facts import Machine
from swiftcp.config.resolve import resolve
from swiftcp.config.resolved import ResolvedConfig

__all__ = ["Concern", "LogprobsConfig", "Machine", "ParityConfig", "ResolvedConfig", "TrainConfig", "resolve", "validate"]
