"""The environment level: variables that users of Qwen's tools and of Megatron-SWIFT already set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import ceil, floor

from swiftcp.config.keys import Key
from swiftcp.config.resolved import Given, Origin
from swiftcp.errors import ConfigError

VARIABLES: dict[str, str] = {
    "IMAGE_MAX_TOKEN_NUM": "image_max_token_num",
    "IMAGE_MIN_TOKEN_NUM": "image_min_token_num",
    "VIDEO_MAX_TOKEN_NUM": "video_max_token_num",
    "VIDEO_MIN_TOKEN_NUM": "video_min_token_num",
    "FPS": "fps",
    "FPS_MIN_FRAMES": "fps_min_frames",
    "FPS_MAX_FRAMES": "fps_max_frames",
    "NPROC_PER_NODE": "nproc_per_node",
}

PIXEL_VARIABLES: dict[str, tuple[str, Callable[[float], int]]] = {
    "MAX_PIXELS": ("image_max_token_num", floor),
    "MIN_PIXELS": ("image_min_token_num", ceil),
    "VIDEO_MAX_PIXELS": ("video_max_token_num", floor),
    "VIDEO_MIN_PIXELS": ("video_min_token_num", ceil),
}

WITHOUT_EFFECT = ("VIDEO_TOTAL_PIXELS", "NFRAMES", "SIZE_FACTOR", "FORCE_QWENVL_VIDEO_READER", "ENABLE_AUDIO_OUTPUT", "USE_AUDIO_IN_VIDEO")
"""Variables of the same tools that mean nothing here: set, they earn a warning."""


def _pixels_to_tokens(variable: str, text: str, pixels_per_token: int) -> str:
    try:
        pixels = float(text)
    except ValueError:
        raise ConfigError(f"environment: {variable}='{text}' is no number of pixels: set a number or unset it") from None
    return str(max(1, PIXEL_VARIABLES[variable][1](pixels / pixels_per_token)))


def _all_given(environment: Mapping[str, str], pixels_per_token: Callable[[], int]) -> Iterator[Given]:
    for variable, key in VARIABLES.items():
        if text := environment.get(variable):
            yield Given(key, text, Origin("environment", f"{variable}={text}"))
    for variable, (key, _) in PIXEL_VARIABLES.items():
        if text := environment.get(variable):
            yield Given(key, _pixels_to_tokens(variable, text, pixels_per_token()), Origin("environment", f"{variable}={text}"))


def read_environment(environment: Mapping[str, str], keys: Mapping[str, Key], pixels_per_token: Callable[[], int]) -> list[Given]:
    """What the environment says about these keys; a variable that is set to nothing counts as unset.

    Args:
        pixels_per_token: pixels of an image that become one token of the model.
    Raises:
        ConfigError: two variables say different things about one key, or pixels are no number.
    """
    given: dict[str, Given] = {}
    for new in _all_given(environment, pixels_per_token):
        old = given.setdefault(new.name, new)
        if new.name in keys and old.value != new.value:
            raise ConfigError(f"{old.origin} and {new.origin} disagree about {new.name} ({old.value} and {new.value} tokens): unset one")
    return [item for item in given.values() if item.name in keys]


def environment_warnings(environment: Mapping[str, str], keys: Mapping[str, Key]) -> list[str]:
    """One line for each media variable that is set and has no effect."""
    if "fps" not in keys:
        return []
    return [f"environment variable {variable} has no effect here" for variable in WITHOUT_EFFECT if environment.get(variable)]


def is_loopback(host: str) -> bool:
    """Whether a MASTER_ADDR is each node itself."""
    return host in ("localhost", "::1") or host.startswith("127.")
