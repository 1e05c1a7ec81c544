"""From four sources to one configuration: command line, then environment, then recipe, then default; each value keeps its origin."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from swiftcp.config.arguments import parse_arguments
from swiftcp.config.concerns import Concern, LogprobsConfig, ParityConfig, TrainConfig
from swiftcp.config.environment import environment_warnings, read_environment
from swiftcp.config.facts import pixels_per_token
from swiftcp.config.keys import Key, keys_of
from swiftcp.config.names import ADVICE, ALIASES, NOT_BUILT, nearest, normalize, unknown
from swiftcp.config.recipe import read_recipe
from swiftcp.config.resolved import Given, Origin, ResolvedConfig
from swiftcp.errors import raise_config_errors

VALUE_ADVICE: dict[tuple[str, str], str] = {
    ("attention_backend", "flash"): "set te: Transformer Engine picks flash or fused attention",
    ("attention_backend", "fused"): "set te: Transformer Engine picks flash or fused attention",
    ("attention_backend", "unfused"): "set torch",
    ("attention_backend", "local"): "set torch",
    ("cp_comm_type", "allgather"): "set all_gather",
    ("truncation_strategy", "split"): "not supported yet: set delete, left or right, or a larger max_length",
    ("report_to", "wandb"): "not supported yet: set tensorboard or none",
    ("report_to", "swanlab"): "not supported yet: set tensorboard or none",
    ("report_to", "all"): "set tensorboard or none",
    ("torch_dtype", "float16"): "float16 is not supported: set bfloat16",
    ("lr_decay_style", "constant_with_warmup"): "set constant, and lr_warmup_iters",
}


RIVALS = (("train_iters", "num_train_epochs"), ("lr_warmup_iters", "lr_warmup_fraction"))
"""Keys that say the same thing in two ways: the one of the higher level wins. On one level both are an error, as a rule says later."""


class _GivenError(Exception):
    """What is wrong with one name or value; collected, so that the user sees all at once."""


def _is_neutral(value: object, neutral: str | None) -> bool:
    return value is None or (neutral is not None and str(value).lower() == neutral)


def _key_name(given: Given, keys: Mapping[str, Key]) -> str | None:
    """The key that a name means; None where it is not built and its value changes nothing."""
    typed = normalize(given.name)
    name = ALIASES.get(typed, typed)
    if name in keys:
        return name
    if isinstance(given.value, Mapping):
        raise _GivenError(_nested(given.name, given.value, keys))
    if name in ADVICE:
        raise _GivenError(f"'{given.name}' is no key here: {ADVICE[name]}")
    if name in NOT_BUILT:
        if _is_neutral(given.value, NOT_BUILT[name]):
            return None
        way_out = f"leave it out or set {NOT_BUILT[name]}" if NOT_BUILT[name] else "leave it out"
        raise _GivenError(f"'{name}' = {given.value} is not supported yet: {way_out}")
    if any(name in keys_of(config) for config in (TrainConfig, LogprobsConfig, ParityConfig)):
        raise _GivenError(f"'{name}' is a key of another command: leave it out")
    raise _GivenError(unknown(given.name, keys))


def _nested(name: str, inner: Mapping[str, object], keys: Mapping[str, Key]) -> str:
    found = {key: nearest(normalize(key), keys) for key in inner}
    hints = ", ".join(f"'{key}' as '{right}'" if right else f"'{key}'" for key, right in found.items())
    return f"'{name}' holds a mapping, but keys are flat: write {hints} at the top level"


def _fit(given: Given, key: Key) -> object:
    """The value in the shape that the key takes: a list for list keys, else no list."""
    if isinstance(given.value, Mapping):
        raise _GivenError(f"'{given.name}' takes {key.metavar}, not a mapping")
    is_sequence = isinstance(given.value, (list, tuple))
    if key.is_list:
        return given.value if is_sequence or given.value is None else [given.value]
    if is_sequence:
        raise _GivenError(f"'{given.name}' takes one {key.metavar}, not a list: {given.value}")
    return given.value


def _by_key(all_given: Iterable[Given], keys: Mapping[str, Key], problems: list[str]) -> dict[str, Given]:
    """One level's values by key, in the shape that each key takes."""
    named: dict[str, Given] = {}
    for given in all_given:
        try:
            name = _key_name(given, keys)
            if name is None:
                continue
            if name in named:
                first = named[name]
                raise _GivenError(f"'{name}' is given twice, first as '{first.name}' ({first.origin}): keep one")
            named[name] = Given(given.name, _fit(given, keys[name]), given.origin)
        except _GivenError as problem:
            problems.append(f"{given.origin}: {problem}")
    return named


def _explain(error: Any, chosen: Mapping[str, Given], keys: Mapping[str, Key]) -> str:
    """One line for one of pydantic's findings."""
    name = str(error["loc"][0])
    if error["type"] == "missing":
        return f"'{name}' is required: give --{name} {keys[name].metavar}, or '{name}: ...' in the recipe"
    given = chosen[name]
    wrong = error["input"]
    message = error["msg"][:1].lower() + error["msg"][1:]
    advice = VALUE_ADVICE.get((name, str(wrong)))
    return f"{given.origin}: {name} = {wrong!r}: {message}" + (f"; {advice}" if advice else "")


def _coerce[C: Concern](config_class: type[C], chosen: Mapping[str, Given], keys: Mapping[str, Key], problems: list[str]) -> C | None:
    values = {name: given.value for name, given in chosen.items() if not (keys[name].is_list and given.value is None)}
    try:
        return config_class.model_validate(values)
    except ValidationError as error:
        problems += [_explain(detail, chosen, keys) for detail in error.errors()]
        return None


def _drop_overruled(chosen: dict[str, Given], recipe: Mapping[str, Given]) -> dict[str, Origin]:
    """Take out keys of the recipe whose rival stands above it. Returns the origin of what takes their place."""
    overruled = {}
    for one, other in (*RIVALS, *((b, a) for a, b in RIVALS)):
        winner, loser = chosen.get(one), chosen.get(other)
        if winner is None or winner.value is None or loser is None:
            continue
        if loser is recipe.get(other) and winner is not recipe.get(one):
            del chosen[other]
            overruled[other] = Origin("default", f"{one} of the {winner.origin.level} wins over {loser.origin}")
    return overruled


def _pixels_per_token(*levels: Mapping[str, Given]) -> Callable[[], int]:
    model = next((level["model"].value for level in levels if "model" in level), None)
    return lambda: pixels_per_token(model if isinstance(model, str) else None)


def resolve[C: Concern](
    config_class: type[C],
    arguments: Sequence[str] = (),
    *,
    values: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> ResolvedConfig[C]:
    """Read all sources and coerce each value to its declared type. Rules across keys come later: see `validate`.

    Args:
        arguments: command line without program and command: `[RECIPE.yaml] --key value ...`.
        values: values from Python, in place of a command line.
        environment: by default the process's.
    Raises:
        ConfigError: unknown, repeated or missing keys, values of the wrong type; all of them in one error.
    """
    environment = os.environ if environment is None else environment
    keys = keys_of(config_class)
    problems: list[str] = []
    recipe_path, typed = parse_arguments(arguments, keys)
    typed += [Given(name, value, Origin("python")) for name, value in (values or {}).items()]
    recipe = _by_key(read_recipe(recipe_path) if recipe_path else [], keys, problems)
    command_line = _by_key(typed, keys, problems)
    from_environment = read_environment(environment, keys, _pixels_per_token(command_line, recipe))
    chosen = recipe | _by_key(from_environment, keys, problems) | command_line
    overruled = _drop_overruled(chosen, recipe)
    config = _coerce(config_class, chosen, keys, problems)
    raise_config_errors(problems)
    assert config is not None
    origins = {name: chosen[name].origin if name in chosen else overruled.get(name, Origin("default")) for name in keys}
    return ResolvedConfig(config, origins, tuple(environment_warnings(environment, keys)))
