"""How counts are told."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `2 micro-batches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
