"""An optimizer's state out of a checkpoint that another number of optimizers has saved.

megatron-core gives experts an optimizer of their own where they are spread over ranks (`ChainedOptimizer`), and none where they are
not. What belongs to a parameter is found by its name under any layout. What is left, settings of groups and the number of steps, lies
where the saving optimizers had it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from megatron.core.optimizer import MegatronOptimizer


def in_as_many_parts(state: dict[Any, Any], saved: Mapping[Any, Any], optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """The state as `optimizer.load_state_dict` takes it.

    Groups get the settings that they have, for those follow from the recipe and the schedule; the number of steps is the saved one.

    Args:
        state: as read, `saved` merged into it.
        saved: what the checkpoint holds of the optimizer beside tensors.
    """
    parts, saved_parts = getattr(optimizer, "chained_optimizers", [optimizer]), _parts(saved)
    if len(parts) == len(saved_parts):
        return state
    own = _parts(state) if len(parts) > 1 else [{key: value for key, value in state.items() if not isinstance(key, int)}]
    # Transformer Engine counts steps in groups, PyTorch in each parameter's state.
    counts = [{"step": group["step"]} for group in _inner(saved_parts[0])["param_groups"] if "step" in group]
    filled = []
    for part, of_part in zip(parts, own, strict=True):
        whole = _filled(of_part, deepcopy(saved_parts[0]))
        _inner(whole)["param_groups"] = list(_groups(part.optimizer.param_groups, counts[0] if counts else {}))
        filled.append(whole)
    return dict(enumerate(filled)) if len(parts) > 1 else filled[0]


def _parts(state: Mapping[Any, Any]) -> list[Any]:
    """One an optimizer; several stand under their numbers."""
    return [state[number] for number in sorted(key for key in state if isinstance(key, int))] or [state]


def _filled(own: Mapping[Any, Any], saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """`own`, and what only `saved` has, at any depth."""
    both = {key: _filled(own[key], saved[key]) for key in own if isinstance(own[key], dict) and isinstance(saved.get(key), dict)}
    return {**saved, **own, **both}


def _inner(state: Any) -> Any:
    """PyTorch's part of it: mixed-precision optimizers have more."""
    return state.get("optimizer", state)


def _groups(groups: Sequence[dict[str, Any]], count: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """As `torch.optim.Optimizer.state_dict` has them: parameters are numbers, counted over all groups."""
    first = 0
    for group in groups:
        yield {**group, **count, "params": list(range(first, first + len(group["params"])))}
        first += len(group["params"])
