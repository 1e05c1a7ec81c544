"""Masks secrets in whatever is printed or saved."""

from __future__ import annotations

import re

MASK = "***"

_NAME = r"(?:[\w-]*[_-]key|apikey|(?:[\w-]*[_-])?(?:auth|credentials?|jwt|passwd|password|secret|signature|sig|token))"
_PATTERNS = (
    re.compile(r"(://[^/\s:@]*:)[^@/\s]+(?=@)"),
    re.compile(rf"((?<![\w-]){_NAME}\s*[=:]\s*['\"]?)[^\s,;&'\"]+", re.IGNORECASE),
    re.compile(rf"(--{_NAME}\s+)\S+", re.IGNORECASE),
    re.compile(r"(\b(?:hf_|sk-|ghp_|glpat-|AKIA))[A-Za-z0-9]{16,}"),
    re.compile(r"(\beyJ)[\w-]{8,}\.[\w-]+\.[\w-]*"),
)


def mask(text: str) -> str:
    """The text with passwords in URLs, `token=...` and the like, and well-known kinds of keys replaced by ***."""
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return text
