"""Grounding: a row's `objects` in the places of `<ref-object>` and `<bbox>`, in the coordinates that Qwen3-VL knows.

Those run from 0 to 1000 over each side of the upright image, as integers: a box is written `[x1, y1, x2, y2]`, a point `[x, y]`.
Rows give them in pixels (`bbox_type` real, the default), from 0 to 1 (norm1) or as they are (norm1000).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from swiftcp.data.values import parse_json, shown
from swiftcp.errors import DataError

_TAG = re.compile("<ref-object>|<bbox>")
_SCALE = 1000
_TOLERANCE = 1.0
"""Pixels that a box may stick out of its image: annotations are rounded."""

BoxType = Literal["real", "norm1", "norm1000"]


@dataclass(frozen=True, slots=True)
class Objects:
    refs: tuple[str, ...]
    """What each `<ref-object>` stands for."""
    boxes: tuple[tuple[float, ...], ...]
    """What each `<bbox>` stands for: x1, y1, x2, y2, or x, y of a point."""
    bbox_type: BoxType
    image_ids: tuple[int, ...]
    """The 0-based image that each box lies in."""

    @property
    def needs_sizes(self) -> bool:
        return self.bbox_type == "real" and bool(self.boxes)


def parse_objects(value: Any, texts: Sequence[str], *, num_images: int) -> Objects | None:
    """The column `objects` of a row with these texts; None where there is none.

    Raises:
        DataError: it has another form, or not as many tags in the texts stand for its references and boxes.
    """
    value = parse_json(value, "objects") if isinstance(value, str) and value else value
    if not value:
        return None
    if not isinstance(value, Mapping):
        raise DataError(f'objects is {shown(value)}: write {{"ref": ["cat"], "bbox": [[x1, y1, x2, y2]]}}')
    refs, boxes, image_ids = (_listed(value, key) for key in ("ref", "bbox", "image_id"))
    bbox_type = value.get("bbox_type") or "real"
    if bbox_type not in ("real", "norm1", "norm1000"):
        raise DataError(f"objects has the bbox_type {shown(bbox_type)}: use real (pixels), norm1 (0 to 1) or norm1000")
    for tag, key, given in (("<ref-object>", "ref", refs), ("<bbox>", "bbox", boxes)):
        num_tags = sum(text.count(tag) for text in texts)
        if num_tags != len(given):
            raise DataError(f"{num_tags} {tag} in the messages, but {len(given)} {key} in objects: give one for each tag")
    if wrong := [ref for ref in refs if not isinstance(ref, str)]:
        raise DataError(f"objects has the ref {shown(wrong[0])}: it must be a string")
    parsed = tuple(_parse_box(box, position) for position, box in enumerate(boxes, start=1))
    ids = _parse_image_ids(image_ids, len(boxes), num_images) if image_ids or bbox_type == "real" else (0,) * len(boxes)
    return Objects(tuple(refs), parsed, cast(BoxType, bbox_type), ids)


def _listed(objects: Mapping[str, Any], key: str) -> list[Any]:
    value = objects.get(key)
    if value is not None and not isinstance(value, list | tuple):
        raise DataError(f"objects has the {key} {shown(value)}: it must be a list")
    return list(value or [])


def _parse_box(box: Any, position: int) -> tuple[float, ...]:
    numbers = box if isinstance(box, list | tuple) else []
    if len(numbers) not in (2, 4) or any(isinstance(n, bool) or not isinstance(n, int | float) or n != n for n in numbers):
        raise DataError(f"bbox {position} of objects is {shown(box)}: it must be [x1, y1, x2, y2] or, for a point, [x, y]")
    if len(numbers) == 4 and (numbers[0] > numbers[2] or numbers[1] > numbers[3]):
        raise DataError(f"bbox {position} of objects is {shown(box)}: x1 must not exceed x2, nor y1 y2 (is it x, y, width, height?)")
    return tuple(float(number) for number in numbers)


def _parse_image_ids(ids: Sequence[Any], num_boxes: int, num_images: int) -> tuple[int, ...]:
    ids = ids or [0] * num_boxes
    if len(ids) != num_boxes:
        raise DataError(f"objects has {len(ids)} image_id for {num_boxes} bbox: give one for each")
    for number in ids:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < num_images:
            raise DataError(f"a bbox of objects lies in image {shown(number)}, but the row has {num_images} images: count image_id from 0")
    return tuple(ids)


def object_writer(objects: Objects, sizes: Mapping[int, tuple[int, int]]) -> Callable[[str], str]:
    """What writes the objects into texts, which it must be given in the order of the conversation.

    Args:
        sizes: (height, width) of the upright image at each index that a box in pixels lies in.

    Raises:
        DataError: a box sticks out of its image.
    """
    refs = iter(objects.refs)
    boxes = (_written(position, objects, sizes) for position in itertools.count())

    def write(text: str) -> str:
        return _TAG.sub(lambda tag: next(refs) if tag[0] == "<ref-object>" else next(boxes), text)

    return write


def _written(position: int, objects: Objects, sizes: Mapping[int, tuple[int, int]]) -> str:
    box, image_id = objects.boxes[position], objects.image_ids[position]
    height, width = sizes[image_id] if objects.bbox_type == "real" else (1, 1) if objects.bbox_type == "norm1" else (_SCALE, _SCALE)
    tolerance = _TOLERANCE if objects.bbox_type == "real" else 0.0
    coordinates = []
    for index, value in enumerate(box):
        side = height if index % 2 else width
        if not -tolerance <= value <= side + tolerance:
            raise DataError(
                f"bbox {position + 1} of objects, {list(box)}, lies outside of image {image_id} of {width}x{height} ({objects.bbox_type}):"
                " mend it, or set bbox_type"
            )
        coordinates.append(round(min(max(value, 0.0), side) / side * _SCALE))
    return str(coordinates)
