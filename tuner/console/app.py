"""The command line: its commands and their exit statuses."""

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
from . import machine, reports, store, tune, variants, verify

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
report_app = typer.Typer(
    help="""Compare stored times: how few kernels suffice, and which page size to serve with.

\b
Example:
  attention-tuner report pages --model llama-3-8b --suite serving
""",
    rich_markup_mode=None,
    no_args_is_help=True,
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    tune.tune,
    variants.generate,
    variants.check,
    variants.bench,
    store.show,
    store.lookup,
    store.export,
    store.import_,
    verify.verify,
    machine.doctor,
)
for command in _COMMANDS:
    app.command(name=command.__name__.rstrip("_"))(command)
for command in (reports.portfolio, reports.pages):
    report_app.command()(command)
app.add_typer(report_app, name="report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, by default that of the process, and return its exit status.

    A mistake of the user is one sentence on stderr and status 2; status 1 is for nothing valid found, 130 for Ctrl-C.
    """
    # Lookups write to an engine's log; the commands print the same themselves.
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
            # An error without a file name, such as a broken pipe, is no mistake of the user.
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
    """Write warnings on stderr as sentences, without the source line that raised them."""
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
