"""Reading and writing a folder takes little more host memory than a rank's own weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swiftcp.models.shapes import shape_file

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "load_memory.py"


def medium_config(folder: Path) -> Path:
    """A Qwen3-VL of 0.2 billion parameters: large enough that tensors, not the allocator, decide."""
    config = json.loads(shape_file("qwen3_vl_2b").read_text())
    config["text_config"] |= dict(
        num_hidden_layers=8, hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=4, vocab_size=16384
    )
    config["vision_config"] |= dict(depth=6, hidden_size=256, intermediate_size=1024, num_heads=4, out_hidden_size=1024)
    config["vision_config"]["deepstack_visual_indexes"] = [1, 2, 3]
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


def medium_config_of_experts(folder: Path) -> Path:
    """A Qwen3-VL-MoE of 0.3 billion parameters, most of them in tensors that hold all experts of a layer (67 and 34 MB)."""
    config = json.loads(shape_file("qwen3_vl_30b_a3b").read_text())
    config["text_config"] |= dict(
        num_hidden_layers=5, hidden_size=512, num_attention_heads=8, num_key_value_heads=4, vocab_size=16384, num_experts=64
    )
    config["text_config"]["moe_intermediate_size"] = 512
    config["vision_config"] |= dict(depth=6, hidden_size=256, intermediate_size=1024, num_heads=4, out_hidden_size=512)
    config["vision_config"]["deepstack_visual_indexes"] = [1, 2, 3]
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_config", "options"),
    [(medium_config, "--shard_mb 50"), (medium_config, "--shard_mb 50 --tp 2"), (medium_config_of_experts, "--shard_mb 100 --ep 2")],
    ids=["one rank", "TP2", "EP2"],
)
def test_a_rank_needs_at_most_1_3_times_its_weights_and_one_shard(
    tmp_path: Path, make_config: Callable[[Path], Path], options: str
) -> None:
    command = [sys.executable, str(SCRIPT), "--shape", str(make_config(tmp_path)), *options.split()]
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within the bound" in done.stdout
