"""The command line: parses and dispatches, and imports neither torch nor anything that does.

The options of commands that train or measure are the keys of their config models: typer shows them, `swiftcp.config` reads them.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from swiftcp import __version__
from swiftcp.config.concerns import TrainingMode
from swiftcp.config.keys import Key, keys_of
from swiftcp.config.slurm import JobConfig
from swiftcp.errors import LostContactError, PreemptedError, SwiftcpError
from swiftcp.run import CONFIG_CLASSES, Command, make_job_script, run, submit_job

OTHER_NAMES = {"train": "sft", "finetune": "sft", "fine-tune": "sft", "pretrain": "pt", "benchmark": "bench"}
"""Commands of other tools, with ours."""


class _Commands(TyperGroup):
    """Suggests what a name means elsewhere, before names that are spelt alike."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and (ours := OTHER_NAMES.get(args[0].lower())):
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{ours}'?")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    help="Fine-tune multimodal Qwen models under context parallelism, with the same result in every layout.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_REPEATED_BY_RANKS_SECONDS = 10.0


class _ConfigCommand(TyperCommand):
    """Shows the keys of a config model as options and leaves all reading to `swiftcp.config`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if {"-h", "--help"} & set(args):
            return super().parse_args(ctx, ["--help"])
        super().parse_args(ctx, [])
        ctx.args = args
        return args


def _option(key: Key) -> inspect.Parameter:
    fact = "Required." if key.required else f"Default: {key.default_text}." if key.default_text else ""
    help_text = f"{key.help} {fact}".strip()
    option = typer.Option(f"--{key.name}", help=help_text, metavar=key.metavar, show_default=False, rich_help_panel=key.panel)
    return inspect.Parameter(key.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option])


def _add_config_command(name: Command, help_text: str) -> None:
    recipe = Annotated[
        str | None, typer.Argument(metavar="RECIPE.yaml", help="YAML file of keys; options win over it.", show_default=False)
    ]

    def command(ctx: typer.Context, **_: Any) -> None:
        raise typer.Exit(run(name, ctx.args))

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
            inspect.Parameter("recipe", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=recipe),
            *(_option(key) for key in keys_of(CONFIG_CLASSES[name]).values()),
        ]
    )
    app.command(name, help=help_text, cls=_ConfigCommand)(command)


_add_config_command("sft", "Supervised fine-tuning: loss on assistant turns.")
_add_config_command("pt", "(Continued) pre-training: loss on every text token, no chat template.")
_add_config_command("logprobs", "Per-token log-probabilities of a data set under any parallel layout.")
_add_config_command("parity", "Prove that a layout gives the same results as one rank, and as transformers, on this machine.")
_add_config_command("export", "A checkpoint of a run, of any layout, as a Hugging Face folder.")
_add_config_command("bench", "Training speed of a real shape with random weights: tokens/s, MFU, peak memory, seconds by part.")


@app.command()
def tiny(
    family: Annotated[str, typer.Argument(help="Model family: qwen3_vl, qwen3_vl_moe, qwen3_omni_moe, qwen3_5 or qwen3_5_moe.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a tiny random checkpoint of a family with tokenizer, processor and chat template, the same bytes each time."""
    from swiftcp.models.tiny import write_tiny

    write_tiny(family, folder, seed)
    print(f"{folder}: a tiny {family}, seed {seed}")


def _slurm_option(name: str, help_text: str, metavar: str | None = None) -> Any:
    names = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
    return typer.Option(*names, help=help_text, metavar=metavar, show_default=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def slurm(
    ctx: typer.Context,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="YAML file of keys; options --key value win over it.")],
    nodes: Annotated[int, _slurm_option("nodes", "Machines.", "INT")],
    gpus_per_node: Annotated[int, _slurm_option("gpus_per_node", "GPUs, and so ranks, of each (with device cpu: ranks).", "INT")],
    mode: Annotated[TrainingMode, _slurm_option("mode", "Command to run. Default: sft.")] = "sft",
    time: Annotated[str | None, _slurm_option("time", "Time limit: minutes, H:MM:SS or D-HH:MM:SS.", "TIME")] = None,
    partition: Annotated[str | None, _slurm_option("partition", "SLURM's partition.", "NAME")] = None,
    account: Annotated[str | None, _slurm_option("account", "SLURM's account.", "NAME")] = None,
    qos: Annotated[str | None, _slurm_option("qos", "SLURM's quality of service.", "NAME")] = None,
    job_name: Annotated[str | None, _slurm_option("job_name", "Default: the recipe's name.", "NAME")] = None,
    cpus_per_node: Annotated[int | None, _slurm_option("cpus_per_node", "Cores of each node. Default: whole nodes.", "INT")] = None,
    grace_seconds: Annotated[int, _slurm_option("grace_seconds", "Seconds to save before the limit. Default: 120.", "INT")] = 120,
    output: Annotated[Path | None, _slurm_option("output", "File for the script. Default: it is printed.", "FILE")] = None,
    submit: Annotated[bool, _slurm_option("submit", "Hand the script to sbatch.")] = False,
) -> None:
    """Write a readable sbatch script for a recipe; a run that is preempted saves and is queued again."""
    job = JobConfig(nodes, gpus_per_node, time, partition, account, qos, job_name, cpus_per_node, grace_seconds)
    script = make_job_script(job, mode, recipe, ctx.args)
    if output is not None:
        output.write_text(script, encoding="utf-8")
    if submit:
        raise typer.Exit(submit_job(script))
    if output is None:
        print(script, end="")


@app.command()
def doctor() -> None:
    """Versions, devices, a self-test of communication, disk, FFmpeg; as Markdown, secrets masked."""
    from swiftcp.doctor import report

    text, healthy = report()
    print(text)
    raise typer.Exit(0 if healthy else 1)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)] = False,
) -> None:
    pass


def _tell(error: SwiftcpError) -> None:
    """Ranks usually meet the same error: those behind the first of a node wait, so that the launcher stops them before they repeat it.

    What all agreed on, to stop, the first alone tells. Of a rank that is gone, its launcher tells first."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and isinstance(error, PreemptedError):
        return
    if os.environ.get("LOCAL_RANK", "0") != "0" or isinstance(error, LostContactError):
        time.sleep(_REPEATED_BY_RANKS_SECONDS)
    print(f"swiftcp: error: {error}" if rank == "0" else f"swiftcp: rank {rank}: error: {error}", file=sys.stderr, flush=True)


def _tell_interrupted() -> None:
    """Once: the launcher tells it for its ranks."""
    if os.environ.get("RANK", "0") == "0" and "SWIFTCP_LAUNCHER" not in os.environ:
        print("swiftcp: interrupted", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (by default the process's).

    Returns the exit code: 0 done, 1 failed, 2 usage, recipe or data error, 75 preempted, 130 interrupted.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="swiftcp")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except SwiftcpError as error:
        _tell(error)
        return error.exit_code
    except KeyboardInterrupt:
        _tell_interrupted()
        return 130
    return 0
