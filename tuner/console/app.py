"""The command line: the commands, and how each one ends."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from typer.main import get_command

from ... import __version__
from ...kernel_templates.errors import InputError, TunerError
from . import machine as commands_machine
from . import reports as commands_report
from . import store as commands_store
from . import tune as commands_tune
from . import variants as commands_variants
from . import verify as commands_verify

PROGRAM = "attention-tuner"
INTERRUPTED = 130
USAGE = InputError.exit_status

app = typer.Typer(
    name=PROGRAM,
    help="Autotuner for the hybrid attention kernel: finds the fastest variant for a GPU, an attention layer and a "
         "batch of mixed prefill, decode and verification, and answers which one to use.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    commands_tune.tune,
    commands_variants.generate,
    commands_variants.check,
    commands_variants.bench,
    commands_store.show,
    commands_store.lookup,
    commands_store.export,
    commands_store.import_,
    commands_verify.verify,
    commands_machine.doctor,
)
for command in _COMMANDS:
    app.command(name=command.__name__.rstrip("_"))(command)
app.add_typer(commands_report.app, name="report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, by default the process's own, and return the status it ends with.

    What the user did wrong is one sentence on stderr and status 2; nothing valid found is 1; Ctrl-C is 130.
    """
    # What a lookup tells an engine's log, the commands say themselves.
    logging.getLogger("attention_tuner").addHandler(logging.NullHandler())
    with _warnings_in_one_line():
        try:
            status = get_command(app).main(
                args=None if arguments is None else list(arguments), prog_name=PROGRAM, standalone_mode=False)
        except typer.TyperException as error:
            context = getattr(error, "ctx", None)
            command = PROGRAM if context is None else context.command_path
            return _fail(f"{error.format_message()} (see {command} --help)", USAGE)
        except TunerError as error:
            return _fail(str(error), error.exit_status)
        except OSError as error:
            # Of a file that the user named; one without a name, such as a broken pipe, is not.
            if error.filename is None:
                raise
            return _fail(f"{error.filename!r} cannot be used: {error.strerror}", USAGE)
        except KeyboardInterrupt:
            status = INTERRUPTED
    if status == INTERRUPTED:
        _fail("interrupted; everything that had finished is kept, and the same command goes on from there", status)
    return status or 0


def _fail(message: str, status: int) -> int:
    typer.echo(f"{PROGRAM}: {' '.join(message.split())}", err=True)
    return status


@contextmanager
def _warnings_in_one_line() -> Generator[None]:
    """Writes warnings on stderr as sentences, without the line of source that raised them."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        yield


def _show_warning(message: Warning | str, *_: object) -> None:
    typer.echo(f"{PROGRAM}: warning: {message}", err=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option(
        "--version", help="Print the version and exit.", callback=_print_version, is_eager=True)] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
