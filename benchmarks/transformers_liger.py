"""What one would use without this project, measured like `swiftcp bench`: `transformers` with SDPA, liger's kernels, gradient
checkpointing, and fused AdamW on bfloat16 states, on one GPU.

    python benchmarks/transformers_liger.py --shape qwen3_vl_2b --num_tokens 32768 --num_images 16

Prints one line of JSON. Needs the package liger-kernel.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import transformers
from liger_kernel.transformers import apply_liger_kernel_to_qwen3_vl
from transformers import AutoConfig

from swiftcp.data.batch import Batch
from swiftcp.models.registry import family_of
from swiftcp.models.shapes import find_shape
from swiftcp.trainers.synthetic import random_pack

DEVICE = torch.device("cuda", 0)


def build(hf_config: Any, architecture: str) -> torch.nn.Module:
    """Random weights in bfloat16."""
    with DEVICE:
        model = getattr(transformers, architecture)._from_config(hf_config, dtype=torch.bfloat16, attn_implementation="sdpa")
    apply_liger_kernel_to_qwen3_vl(model=model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def model_inputs(batch: Batch, hf_config: Any) -> dict[str, torch.Tensor]:
    """A pack of one sample as `transformers` takes it; labels are not shifted there."""
    ids = batch.input_ids_BS.to(DEVICE)
    is_image = ids == hf_config.image_token_id
    inputs = {"input_ids": ids, "labels": torch.where(is_image, -100, ids), "mm_token_type_ids": is_image.int()}
    if batch.visual is not None:
        inputs |= {"pixel_values": batch.visual.patches_PD.to(DEVICE), "image_grid_thw": batch.visual.grid_thw.to(DEVICE)}
    return inputs


def train_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, hf_config: Any, num_steps: int) -> float:
    """Seconds of all steps together."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num_steps):
        model(**model_inputs(batch, hf_config), use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3_vl_2b")
    for name, default in (("num_tokens", 32768), ("num_images", 0), ("image_tokens", 1024), ("num_steps", 4), ("num_warmup_steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    hf_config = AutoConfig.from_pretrained(find_shape(given.shape))
    family = family_of(hf_config.model_type)
    sizes = given.num_tokens, 1, given.num_images, given.image_tokens
    batch = random_pack(*sizes, family=family, hf_config=hf_config, geometry=family.tower_geometry(hf_config), seed=0)
    model = build(hf_config, family.architecture)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    train_steps(model, optimizer, batch, hf_config, given.num_warmup_steps)
    seconds = train_steps(model, optimizer, batch, hf_config, given.num_steps) / given.num_steps
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(
        json.dumps(vars(given) | {"seconds_per_step": seconds, "tokens_per_second_per_gpu": given.num_tokens / seconds, "memory_gib": peak})
    )


if __name__ == "__main__":
    main()
