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
from swiftcp.config.keys import Key, keys_of
from swiftcp.errors import PreemptedError, SwiftcpError
from swiftcp.run import CONFIG_CLASSES, Command, run

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
_add_config_command("bench", "Training speed of a real shape with random weights: tokens/s, MFU, peak memory, seconds by part.")


@app.command()
def tiny(
    family: Annotated[str, typer.Argument(help="Model family: qwen3_vl.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a tiny random checkpoint of a family with tokenizer, processor and chat template, the same bytes each time."""
    from swiftcp.models.tiny import write_tiny

    write_tiny(family, folder, seed)
    print(f"{folder}: a tiny {family}, seed {seed}")


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
    """Ranks usually meet the same error: those behind the first wait, so that the launcher stops them before they repeat it.

    What all agreed on, to stop, the first alone tells."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and isinstance(error, PreemptedError):
        return
    if rank != "0":
        time.sleep(_REPEATED_BY_RANKS_SECONDS)
    print(f"swiftcp: error: {error}" if rank == "0" else f"swiftcp: rank {rank}: error: {error}", file=sys.stderr, flush=True)


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
        return 130
    return 0
