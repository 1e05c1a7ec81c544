"""The quick start: make a tiny Qwen3-VL, teach it to read handwritten digits under context parallelism, and see that it does.

    python examples/quickstart/run.py [FOLDER]

FOLDER (default: output/quickstart) holds all that is written. A second call goes on where the first one stopped.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def main(folder: Path) -> None:
    start = time.monotonic()
    tiny, data, run = folder / "tiny", folder / "data", folder / "run"
    _call("-m", "swiftcp", "tiny", "qwen3_vl", tiny)
    _call(HERE / "prepare.py", data)
    recipe = [HERE / "recipe.yaml", "--model", tiny, "--dataset", data / "train.jsonl", "--output_dir", run]
    _call("-m", "swiftcp", "sft", *recipe)
    _call(HERE / "evaluate.py", run / "hf", data / "test.jsonl", folder / "figures.json")
    _report(folder, time.monotonic() - start)


def _call(*arguments: str | Path) -> None:
    """Run one step, after showing it as one would type it. A step that fails has said why: its exit code is ours."""
    command = [str(argument) for argument in arguments]
    print(f"\n$ python {shlex.join(command)}", flush=True)
    if code := subprocess.run([sys.executable, *command], env=_environment()).returncode:
        sys.exit(code)


def _environment() -> dict[str, str]:
    """One thread a rank suits a model this small; byte code is kept, for without it each step starts half a minute later."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {"OMP_NUM_THREADS": "1"} | kept


def _report(folder: Path, seconds: float) -> None:
    figures = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    last = json.loads((folder / "run" / "logging.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    print(
        f"\n{figures['accuracy']:.1%} of {figures['rows']} held-out digits are read right"
        f" ({figures['accuracy_images_swapped']:.1%} with the images swapped)."
        f"\nTraining: {last['iteration']} steps in {last['elapsed_seconds']:.0f} s; the whole quick start: {seconds:.0f} s."
        f"\nThe trained model is a Hugging Face folder: {folder / 'run' / 'hf'}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("output/quickstart"))
