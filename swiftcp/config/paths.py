"""Paths that users give, and the names of files that more than one layer looks for."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
CHECKPOINTS_FOLDER = "checkpoints"
"""In the output folder."""
MARKER_FILE = "complete.json"
"""In a checkpoint of a run; written last."""
ROW_FILES = (".jsonl", ".json", ".csv", ".parquet")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")
STATE_FILE = "state.json"
"""In a checkpoint of a run: where it stands, and of what recipe."""


def may_be_replaced(folder: Path) -> bool:
    """Whether an export may put its folder there: nothing is, or a model or an adapter."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return True
    return any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG_FILE))


def missing(what: str, path: Path) -> str:
    """Message for a path that does not exist: how far it exists, and the name that was likely meant."""
    parent = path.parent
    if not parent.is_dir():
        existing = next((folder for folder in parent.parents if folder.is_dir()), None)
        return f"{what} {path} does not exist: there is no folder {parent}" + (f", only {existing}" if existing else "")
    matches = get_close_matches(path.name, [entry.name for entry in parent.iterdir()], n=1)
    return f"{what} {path} does not exist" + (f": did you mean '{parent / matches[0]}'?" if matches else f": {parent} holds no such entry")


def is_hub_name(dataset: str) -> bool:
    """`owner/name`, with `:subset` behind it perhaps, where neither it nor a folder `owner` lies here and no file of rows is meant."""
    path = Path(dataset)
    is_name = _HUB_NAME.fullmatch(dataset) is not None and path.suffix.lower() not in ROW_FILES
    return is_name and not path.exists() and not path.parent.exists()


def split_row_limit(dataset: str) -> tuple[Path, int | None]:
    """`rows.jsonl#100` is the first 100 rows of rows.jsonl; a path that exists as it stands is taken as it stands."""
    path, mark, limit = dataset.rpartition("#")
    if not mark or not limit.isdigit() or Path(dataset).exists():
        return Path(dataset), None
    return Path(path), int(limit)
