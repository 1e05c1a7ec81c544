"""`swiftcp bench` beside `transformers_liger.py` on the same shapes, one after the other on one GPU; prints a Markdown table.

python benchmarks/compare.py [WORKLOAD ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

WORKLOADS: dict[str, list[str]] = {
    "2b-32k-text": ["--shape", "qwen3_vl_2b"],
    "2b-32k-images": ["--shape", "qwen3_vl_2b", "--num_images", "16"],
    "2b-128k-text": ["--shape", "qwen3_vl_2b", "--num_tokens", "131072"],
}
PROGRAMS: dict[str, list[str]] = {
    "transformers + liger": [str(HERE / "transformers_liger.py")],
    "swiftcp, full recompute": ["-m", "swiftcp", "bench", "--nproc_per_node", "1", "--recompute_granularity", "full"],
    "swiftcp, no recompute": ["-m", "swiftcp", "bench", "--nproc_per_node", "1"],
}


def measure(program: list[str], workload: list[str]) -> dict[str, Any] | str:
    """The program's line of JSON, or why there is none."""
    steps = ["--num_steps", "4", "--num_warmup_steps", "2"]
    done = subprocess.run([sys.executable, *program, *workload, *steps], capture_output=True, text=True, cwd=HERE.parent, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if found:
        return json.loads(found[-1])
    return "out of memory" if "OutOfMemoryError" in done.stderr else done.stderr.strip().rsplit("\n", 1)[-1]


def main() -> None:
    print("| workload | program | tokens/s | peak GiB |\n| --- | --- | --- | --- |", flush=True)
    for name in sys.argv[1:] or WORKLOADS:
        for label, program in PROGRAMS.items():
            found = measure(program, WORKLOADS[name])
            cells = found if isinstance(found, str) else f"{found['tokens_per_second_per_gpu']:,.0f} | {found['memory_gib']:.1f}"
            print(f"| {name} | {label} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
