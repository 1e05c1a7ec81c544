"""Every public shape builds, and its parameters pair one to one with the tensors of `transformers`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swiftcp.models.shapes import shape_file, shape_names
from tests.distributed.model_harness import as_stored
from tests.distributed.ranks import RankPool


def names_and_shapes(config_file: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], int]:
    """(the checkpoint's tensors by our name table, those of `transformers`, parameters); on the meta device, nothing is allocated."""
    import torch
    import transformers
    from transformers import AutoConfig

    from swiftcp.checkpoint.hf_reader import model_tensors
    from swiftcp.models.build import build_model, transformer_config
    from swiftcp.models.registry import family_of
    from swiftcp.parallel.cpu_shim import cpu_mode
    from swiftcp.parallel.mesh import build_mesh

    hf_config = AutoConfig.from_pretrained(config_file)
    family = family_of(hf_config.model_type)
    with cpu_mode():
        mesh = build_mesh(torch.device("cpu"))
        config = transformer_config(family, hf_config, mesh, dtype=torch.bfloat16, backend="torch")
        model = build_model(family, hf_config, config, mesh, backend="torch", device=torch.device("meta"))
    ours = model_tensors(model)
    stored = {}
    for target, rule in family.name_table(hf_config).pair(list(ours)).items():
        stored.update(zip(rule.sources, rule.source_shapes(ours[target].shape), strict=True))
    with torch.device("meta"):
        theirs = getattr(transformers, family.architecture)._from_config(hf_config)
    expected = {name: tuple(parameter.shape) for name, parameter in as_stored(dict(theirs.named_parameters()), hf_config).items()}
    return stored, expected, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("shape", shape_names())
def test_a_public_shape_builds_and_pairs_with_transformers(ranks: RankPool, shape: str) -> None:
    stored, expected, num_parameters = ranks.run(names_and_shapes, shape_file(shape), num_ranks=1)[0]
    assert stored == expected
    billions = float(re.findall(r"(?:_0_|_)\d+(?=b)", shape)[0].removeprefix("_").replace("_", "."))
    assert 0.9 * billions < num_parameters / 1e9 < 1.3 * billions
