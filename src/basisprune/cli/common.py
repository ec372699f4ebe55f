"""Shared by the subcommands: errors and exit codes, numbers with units, settings from a file."""

from __future__ import annotations

import errno
import inspect
import io
import json
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TextIO, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from basisprune.callback import NullCallback
from basisprune.errors import BasisPruneError, ConfigError, ModelError, is_about_memory, nearest, printable
from basisprune.runs.settings import OBJECTS, OPTIONS, Option, Panel

if TYPE_CHECKING:
    from torch import nn

FAILED, NOT_KEPT, INTERRUPTED = 1, 3, 130
_SAFE_PATH = "PYTHONSAFEPATH"
_RESUMES = "run the same command again to resume"
_LESS_MEMORY = "use smaller images (--size) or batches (recipe: {train: {batch_size: ...}})"
_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "use a disk, or a limit, that allows larger files",
    errno.EROFS: "use another folder, or make the disk writable",
    errno.EACCES: "ask for permission, or use another folder",
    errno.EPERM: "ask for permission, or use another folder",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "close other programs",
    errno.ENOMEM: _LESS_MEMORY,
    errno.EIO: "check the disk",
    errno.ESTALE: "mount the network folder again",
    errno.ETIMEDOUT: "check the network folder",
    errno.ENAMETOOLONG: "use a shorter name",
}
_FROM_WORKER = re.compile(r"Error: \[Errno (\d+)\] (.+)\s*$")  # the last line of what PyTorch makes of its error
_IGNORED = frozenset({"versions", "device_sha256", "prepared"})
_NAMED = re.compile(
    rf"^({'|'.join(OPTIONS)})\b(?=[:,] | given)|\b({'|'.join(name for name in OPTIONS if '_' in name)})\b(?![=:]\S)"
)
_ONLY_TYPED = {  # what would let a file run code, or replace others
    "trust_code": "a file cannot vouch for itself; if you trust its author, pass --trust-code on the command line",
    "ray_address": "a cluster runs code here and there; pass --ray-address on the command line",
    "overwrite": "what is replaced is said on the command line alone; pass --overwrite there",
}
_PLACE = "where export writes is said on the command line alone"


@contextmanager
def told_errors() -> Iterator[None]:
    """Print errors without a traceback and exit with code 1, whoever raised them; Ctrl-C exits with 130."""
    try:
        yield
    except BasisPruneError as error:
        raise _failed(as_typed(error).text(indented)) from error
    except BrokenPipeError as error:  # the reader of the output has gone
        raise typer.Exit(FAILED) from error
    except OSError as error:
        raise _failed(_said_by_system(error)) from error
    except SystemExit as error:
        raise _failed(f"code that is not basisprune's ended the program, with exit code {error.code}") from error
    except (MemoryError, RuntimeError) as error:
        if is_about_memory(error):
            said = f" ({str(error)[:200]})" if str(error) else ""
            raise _failed(f"there is not enough memory{said}; {_LESS_MEMORY}; {_RESUMES}") from error
        if "too many open files" not in str(error).lower():
            raise
        raise _failed(f"too many open files; {_ADVICE[errno.EMFILE]}, and {_RESUMES}") from error
    except KeyboardInterrupt:
        with suppress(ValueError):  # only the main thread may
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # who presses Ctrl-C twice sees the same as who does once
        tell(f"stopped; {_RESUMES}")
        raise typer.Exit(INTERRUPTED) from None


def as_typed(error: BasisPruneError) -> BasisPruneError:
    """Write the options in an error about them as they are typed; those in a file have its name.

    >>> str(as_typed(ConfigError.of("compress", ["max_drop, min_accuracy given; pass one", "size: 0 given"])))
    '2 faults\\n  - --max-drop, --min-accuracy given; pass one\\n  - --size: 0 given'
    """
    if not isinstance(error, ConfigError) or error.where not in ("", "compress", "load_data", "train"):
        return error
    return ConfigError(*(_NAMED.sub(lambda name: f"--{name[0].replace('_', '-')}", fault) for fault in error.faults))


def indented(text: str) -> str:
    """The text, its further lines indented, so that none of them looks like a line of ours."""
    return "\n    ".join(text.split("\n"))


def _failed(message: str) -> typer.Exit:
    tell(f"error: {message}")
    return typer.Exit(FAILED)


def _said_by_system(error: OSError) -> str:
    if error.errno is None and (inner := _FROM_WORKER.search(str(error))):
        error = OSError(int(inner[1]), inner[2])
    name = error.filename if error.filename2 is None else error.filename2  # of what was to be replaced
    where = "" if name is None else f"{str(name)[:200]}: "
    advice = _ADVICE.get(error.errno or 0, "see to that")
    return f"{where}{error.strerror or error}; {advice}, and {_RESUMES}"


class Commands(TyperGroup):
    """The subcommands, with one place that meets whatever goes wrong in any of them."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command; a stream that is closed is nowhere, and no name is impossible to print.

        No Python that is started meanwhile, by whatever library, imports modules of the current folder.
        """
        _mend_streams()
        before = os.environ.get(_SAFE_PATH, "")
        os.environ[_SAFE_PATH] = "1"
        try:
            return super().main(*args, **options)
        finally:
            os.environ[_SAFE_PATH] = before  # which means nothing where it is empty

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            with told_errors():
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        finally:
            for stream in (sys.stdout, sys.stderr):
                _give_up_if_broken(stream)


_CODE: dict[str, Literal["factory", "loaders", "task"]] = {
    "model": "factory",
    "models": "factory",
    "data": "loaders",
    "task": "task",
}
"""The options that may name code, and what that is to give."""


class Command(TyperCommand):
    """A subcommand: of code that texts refer to, it imports what was typed here, or with --trust-code any."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        logging.basicConfig(handlers=[_Escaping()])  # unless somebody has set up logging
        from basisprune.torchkit.imports import Code, only_code

        typed: list[Code] = [
            (role, name)
            for option, role in _CODE.items()
            if typed_here(ctx, option)
            for name in (ctx.params[option] if option == "models" else [str(ctx.params[option])])
            if not os.path.exists(name)  # a folder is no function, whatever it is called
        ]
        with only_code(None if ctx.params.get("trust_code") else typed):
            return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options in their groups, those without one last."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{name: [] for name in get_args(Panel)}}
        for each in self.get_params(ctx):
            name = getattr(each, "rich_help_panel", None) or "Options"
            group = "Arguments" if each.param_type_name == "argument" else name
            groups.setdefault(group, []).extend(filter(None, [each.get_help_record(ctx)]))
        for group, records in groups.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


class _Escaping(logging.StreamHandler[TextIO]):
    """Writes records to stderr without what a terminal acts on: libraries log texts out of files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _mend_streams() -> None:
    """Opens the standard streams that are closed, or the next file that is opened would get what is meant for them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # has the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", "") == "strict" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _give_up_if_broken(stream: Any) -> None:
    """Lets a stream that cannot be written to lead nowhere, or Python would complain about it when it exits."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def tell(message: str) -> None:
    """Prints a progress message on stderr, if it can be printed there."""
    with suppress(OSError):  # a run does not end because its log does
        typer.echo("\n".join(map(printable, message.split("\n"))), err=True)


def show(*lines: str) -> None:
    """Prints lines on stdout; whatever names of files or classes are in them, each is one line, and text alone."""
    for line in lines:
        typer.echo(printable(line))


class Teller(NullCallback):
    """Prints each message of a run on stderr."""

    def log(self, line: str) -> None:
        tell(line)


def show_json(value: object) -> None:
    """Prints the one JSON value on stdout for --json; all that is no ASCII is escaped."""
    typer.echo(json.dumps(value))


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["basisprune", *sys.argv[1:]]).encode(errors="backslashreplace").decode()


def option(name: str) -> Any:
    """Make a typer option from the declared one of that name."""
    declared = OPTIONS[name]
    unit, metavar = declared.unit, declared.metavar
    return typer.Option(
        parser=_parser(declared),
        metavar=metavar if unit is None else unit.metavar,
        help=declared.help,
        hidden=declared.hidden,
        show_default=not isinstance(declared.default, bool),
        rich_help_panel=declared.panel,
    )


def _parser(declared: Option) -> Callable[[Any], object] | None:
    """Return the parser of the option; None for texts, whole numbers and flags, which typer parses."""
    if declared.unit is not None:
        return partial(_parsed, declared.unit.parse)
    if Sequence[float] in get_args(declared.type):
        return partial(_parsed, _numbers)
    return (lambda given: given) if declared.name in ("recipe", "search") else None  # in a file, a mapping


def _numbers(text: object) -> list[float]:
    """Return numbers with commas between them, one for each channel or one for all; in a file, they may be a list.

    >>> _numbers("0.485,0.456,0.406"), _numbers([0.5])
    ([0.485, 0.456, 0.406], [0.5])
    """
    try:
        return [float(str(part)) for part in (text if isinstance(text, list) else str(text).split(","))]
    except ValueError:
        raise ConfigError(f"{text!r} given; expected numbers such as 0.485,0.456,0.406") from None


def _parsed(parse: Callable[[object], object], text: object) -> object:
    try:
        return parse(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def takes_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the declared options of these names in place of its `**options`."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        made = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=OPTIONS[name].default,
                annotation=Annotated[_typed(OPTIONS[name].type), option(name)],
            )
            for name in names
        ]
        command.__signature__ = signature.replace(parameters=[*own, *made])  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in (*own, *made)}
        return command

    return add


def _typed(kind: object) -> Any:
    """Return the type for typer: int, bool, or str for the rest, which `configure` checks."""
    found = next((each for each in (bool, int) if each in (kind, *get_args(kind))), str)
    return Optional[found]  # noqa: UP045


def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Use the settings in a YAML file as defaults of the command's options; report all faults at once."""
    if path is None:
        return None
    from basisprune.runs.parsing import read_settings

    given = {key.replace("-", "_"): value for key, value in read_settings(path).items() if key not in _IGNORED}
    options = _options(ctx.command)
    hints = get_type_hints(ctx.command.callback, include_extras=True)
    only_typed = _ONLY_TYPED | (dict.fromkeys(("result", "output"), _PLACE) if "overwrite" in options else {})
    faults = []
    for key, value in given.items():
        if key in only_typed and value is not None:
            faults.append(f"{key}: {value!r} given in a file; {only_typed[key]}")
        elif key not in options:
            hint = nearest(key, options) or f" Known settings: {', '.join(options)}"
            faults.append(f"{key}: no such setting.{hint}")
        elif value is not None:
            faults += _faults_of(key, value, get_args(hints[options[key]]))
    if faults:
        raise ConfigError.of(str(path), faults)
    ctx.default_map = {options[key]: value for key, value in given.items() if value is not None}
    return path


def _options(command: Any) -> dict[str, str]:
    """Map the options as typed, `json` for `--json`, to the names of their parameters."""
    return {
        param.opts[0].removeprefix("--").replace("-", "_"): param.name
        for param in command.params
        if param.name != "help" and not param.name.startswith("_")
    }


def _faults_of(key: str, value: Any, annotated: Sequence[Any]) -> list[str]:
    """List what is wrong with a value in a file, according to the option's parser or type."""
    from basisprune.runs.parsing import faults_of, recipe_of, search_of

    checks: dict[str, Callable[[Any], object]] = {"recipe": recipe_of, "search": search_of}
    kind, *options = annotated
    check = checks.get(key) or next((each.parser for each in options if getattr(each, "parser", None)), None)
    try:
        if check is None:
            is_declared = key in OPTIONS and key not in OBJECTS
            return faults_of(value, OPTIONS[key].type if is_declared else kind, key)
        check(value)
    except ConfigError as error:
        return [f"{key}: {fault}" if error.where else fault for fault in error.faults]
    except typer.BadParameter as error:
        return [f"{key}: {error.message}"]
    return []


def typed_here(ctx: typer.Context, name: str) -> bool:
    """Whether the option was given on the command line, not in a file or by default."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=read_config,
        is_eager=True,
        help="A YAML file with options by name; command-line options override it.",
    ),
]
TrustCode = Annotated[bool, option("trust_code")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
Model = Annotated[
    str,
    typer.Option(
        rich_help_panel="Model",
        help="A timm name, hf-hub:owner/name, local-dir:folder, torchvision:name, package.module:factory, or a model/ "
        "folder written by train.",
    ),
]
Weights = Annotated[str | None, option("weights")]
Data = Annotated[
    str,
    typer.Option(
        rich_help_panel="Data",
        help="A folder of class folders, .tar shards or Parquet files, an .npz file, torchvision:NAME, "
        "wds:a-{00..99}.tar, hf:NAME, or package.module:loaders.",
    ),
]
Output = Annotated[
    Path, typer.Option(rich_help_panel="Output", help="The output folder; an unfinished run in it resumes.")
]


def named_network(
    model: str, size: int | None, classes: int, trust_code: bool, *, keep_head: bool = False, weights: str | None = None
) -> nn.Module:
    """The network in a folder, or a new one by name, with a head for that many classes or its own."""
    from basisprune.deploy.export.runtime import FileModel
    from basisprune.runs.finished import load_any
    from basisprune.transfer.model import transfer_model

    if not Path(model).exists():
        if keep_head:
            from basisprune.transfer.hints import Hints
            from basisprune.transfer.model import kept_model

            return kept_model(model, weights=weights, input_hints=Hints(None if size is None else (size, size)))
        return transfer_model(model, classes, weights=weights, input_size=size)
    network = load_any(model, trust_remote_code=trust_code).model
    if isinstance(network, FileModel):
        raise ModelError(f"{model}: the layers of an exported file cannot be listed; pass the model/ folder next to it")
    return network
