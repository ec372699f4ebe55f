"""Shared by the subcommands: errors and exit codes, numbers with units, settings from a file."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from basisprune.errors import printable
from basisprune.listener import Silence
from basisprune.runs.units import AMOUNT, FRACTION, LEVEL, TIME, Unit

if TYPE_CHECKING:
    from torch import nn

FAILED, NOT_KEPT, INTERRUPTED = 1, 3, 130
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
_IGNORED = frozenset({"versions", "device_sha256"})
_ONLY_TYPED = {  # what would let a file run code
    "trust_code": "a file cannot vouch for itself; if you trust its author, pass --trust-code on the command line",
    "ray_address": "a cluster runs code here and there; pass --ray-address on the command line",
}


@contextmanager
def told_errors() -> Iterator[None]:
    """Prints errors of basisprune and of the system without a traceback and exits with code 1; Ctrl-C exits with 130.

    A program that is ended by somebody else's code, such as a network's, ends with an error too.
    """
    from basisprune.errors import BasisPruneError, is_about_memory

    try:
        yield
    except BasisPruneError as error:
        raise _failed(error.text(indented)) from error
    except BrokenPipeError as error:  # whoever read the output has gone
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


def indented(text: str) -> str:
    """The text, its further lines indented, so that none of them looks like a line of ours."""
    return "\n    ".join(text.split("\n"))


def _failed(message: str) -> typer.Exit:
    tell(f"error: {message}")
    return typer.Exit(FAILED)


def _said_by_system(error: OSError) -> str:
    """What the system says, where, and what to do about it."""
    if error.errno is None and (inner := _FROM_WORKER.search(str(error))):
        error = OSError(int(inner[1]), inner[2])
    name = error.filename if error.filename2 is None else error.filename2  # of what was to be replaced
    where = "" if name is None else f"{str(name)[:200]}: "
    advice = _ADVICE.get(error.errno or 0, "see to that")
    return f"{where}{error.strerror or error}; {advice}, and {_RESUMES}"


class Commands(TyperGroup):
    """The subcommands, with one place that meets whatever goes wrong in any of them."""

    def main(self, *args: Any, **options: Any) -> Any:
        """What the command ends with; a stream that is closed is nowhere, and no name is impossible to print."""
        _mend_streams()
        return super().main(*args, **options)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """What the subcommand gives; its output has arrived."""
        try:
            with told_errors():
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        finally:
            for stream in (sys.stdout, sys.stderr):
                _give_up_if_broken(stream)


class Command(TyperCommand):
    """A subcommand: of code that texts refer to, it imports what was typed here, or with --trust-code any."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """What the subcommand gives."""
        _escape_logs()
        from basisprune.torchkit.first_import import import_torch
        from basisprune.torchkit.references import only_code

        import_torch()

        typed = [value for name, value in ctx.params.items() if typed_here(ctx, name)]
        listed = [each for value in typed for each in (value if isinstance(value, list) else [value])]
        with only_code(None if ctx.params.get("trust_code") else [each for each in listed if isinstance(each, str)]):
            return super().invoke(ctx)


class _Escaping(logging.Formatter):
    """Writes records without what a terminal acts on: libraries log texts out of files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _escape_logs() -> None:
    """Have what libraries log go to stderr with escapes, unless somebody has set up logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Escaping())
    logging.basicConfig(handlers=[handler])


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


class Teller(Silence):
    """Prints each message of a run on stderr."""

    def say(self, line: str) -> None:
        """Prints the message."""
        tell(line)


def show_json(value: object) -> None:
    """Prints the one JSON value on stdout for --json; all that is no ASCII is escaped."""
    typer.echo(json.dumps(value))


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["basisprune", *sys.argv[1:]]).encode(errors="backslashreplace").decode()


def fraction(text: object) -> float:
    """A percentage or fraction as a number.

    >>> fraction("1%"), fraction("0.5")
    (0.01, 0.5)
    """
    return _number(text, FRACTION)


def level(text: object) -> float:
    """A value of a metric, of which some are negative: a percentage or a number.

    >>> level("90%"), level("-3.2")
    (0.9, -3.2)
    """
    return _number(text, LEVEL)


def amount(text: object) -> int:
    """A count with an optional unit as a number.

    >>> amount("1.5M"), amount("300k")
    (1500000, 300000)
    """
    return round(_number(text, AMOUNT))


def milliseconds(text: object) -> float:
    """A time in milliseconds; without a unit it already is.

    >>> milliseconds("5ms"), milliseconds("0.2s")
    (5.0, 200.0)
    """
    return _number(text, TIME)


def _number(text: object, unit: Unit) -> float:
    from basisprune.errors import ConfigError

    try:
        return unit.parse(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def numbers(text: object) -> list[float]:
    """Numbers with commas between them, one for each channel or one for all; or a list of them from a file.

    >>> numbers("0.485,0.456,0.406"), numbers([0.5])
    ([0.485, 0.456, 0.406], [0.5])
    """
    parts = text if isinstance(text, list) else str(text).split(",")
    try:
        return [float(str(part)) for part in parts]
    except ValueError:
        raise typer.BadParameter(f"{text!r} given; expected numbers such as 0.485,0.456,0.406") from None


def as_given(value: Any) -> Any:
    """The value unchanged: a name from the command line, or a mapping of settings from a file."""
    return value


def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Uses the settings in a YAML file as defaults for the command's options; reports all faults at once."""
    if path is None:
        return None
    with told_errors():
        from basisprune.errors import ConfigError, nearest
        from basisprune.runs.validating import read_settings

        given = {key.replace("-", "_"): value for key, value in read_settings(path).items() if key not in _IGNORED}
        options = _options(ctx.command)
        hints = get_type_hints(ctx.command.callback, include_extras=True)
        faults = []
        for key, value in given.items():
            if key in _ONLY_TYPED and value is not None:
                faults.append(f"{key}: {value!r} given in a file; {_ONLY_TYPED[key]}")
            elif key not in options:
                hint = nearest(key, options) or f" Known settings: {', '.join(options)}"
                faults.append(f"{key}: no such setting.{hint}")
            elif value is not None:
                faults += _faults_of(key, value, hints[options[key]])
        if faults:
            raise ConfigError.of(str(path), faults)
    ctx.default_map = {options[key]: value for key, value in given.items() if value is not None}
    return path


def _options(command: Any) -> dict[str, str]:
    """The options as typed, `json` for `--json`, mapped to the names of their parameters."""
    return {
        param.opts[0].removeprefix("--").replace("-", "_"): param.name
        for param in command.params
        if param.name != "help" and not param.name.startswith("_")
    }


def _faults_of(key: str, value: Any, annotated: Any) -> list[str]:
    """What is wrong with a value for an option, according to its parser or its type."""
    from basisprune.errors import ConfigError
    from basisprune.runs.validating import faults_of, recipe_of, search_of

    checks: dict[str, Callable[[Any], object]] = {"recipe": recipe_of, "search": search_of}
    kind, *options = get_args(annotated)
    check = checks.get(key) or next((each.parser for each in options if getattr(each, "parser", None)), None)
    try:
        if check is None:
            return faults_of(value, kind, key)
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
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code", help="Import the code that a bundle or a file of settings names; only if you trust who made it."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
Model = Annotated[
    str,
    typer.Option(
        help="A timm name (also hf-hub:owner/name, local-dir:folder), torchvision:name, package.module:factory, or a "
        "model/ folder written by train."
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="The model's weights: .safetensors, .pt, .pth, .ckpt, or a folder of Hugging Face or timm."
    ),
]
WeightsKey = Annotated[
    str | None, typer.Option(metavar="NAME", help="The entry of that file with the weights, such as state_dict_ema.")
]
KeepHead = Annotated[
    bool,
    typer.Option(
        "--keep-head", help="The model is trained for these classes: keep its head, and do not train it before pruning."
    ),
]
TuneFirst = Annotated[
    bool, typer.Option("--tune-first", help="With --keep-head: train it on your images before it is pruned.")
]
Mean = Annotated[
    Any,
    typer.Option(
        "--mean", parser=numbers, metavar="NUMBERS", help="Subtracted from pixels of 0 to 1 (default: the model's)."
    ),
]
Std = Annotated[
    Any,
    typer.Option("--std", parser=numbers, metavar="NUMBERS", help="Pixels are divided by it (default: the model's)."),
]
Interpolation = Annotated[
    str | None, typer.Option(help="How images are resized: bilinear, bicubic or nearest (default: the model's).")
]
Data = Annotated[
    str,
    typer.Option(
        help="A folder of class folders, an .npz file, torchvision:NAME, wds:a-{00..99}.tar, hf:NAME, or "
        "package.module:loaders."
    ),
]
Output = Annotated[Path, typer.Option(help="The output folder; an unfinished run in it resumes.")]
RecipeOption = Annotated[
    Any,
    typer.Option(
        "--recipe",
        parser=as_given,
        metavar="NAME",
        help="Settings of all stages: quick, best, paper, paper:cifar10, ...",
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Training epochs (default: the recipe's).")]
AugmentOption = Annotated[
    str | None,
    typer.Option(help="How training images are changed: auto, none, light or strong (default: the recipe's)."),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(help="Numbers to train in: auto, float32, bfloat16 or float16 (default: the recipe's)."),
]
Size = Annotated[int | None, typer.Option(help="Image height and width in pixels (default: the model's).")]
Pretrained = Annotated[bool, typer.Option(help="Start from pretrained weights.")]
ValFraction = Annotated[
    float, typer.Option(parser=fraction, metavar="PERCENT", help="Held out for validation if the data has no val/.")
]
TestFraction = Annotated[
    float,
    typer.Option(parser=fraction, metavar="PERCENT", help="Held out for the final test if the data has no test/."),
]
ConfirmFraction = Annotated[
    float,
    typer.Option(
        parser=fraction,
        metavar="PERCENT",
        help="Share of the validation images that nothing looks at before they confirm an accuracy budget.",
    ),
]
Groups = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="A CSV file of file,group: images of one group are never divided."),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse damaged images, and images in several parts, instead of reporting them."),
]
Limit = Annotated[int | None, typer.Option(help="Train on at most this many images.")]
Seed = Annotated[int, typer.Option(help="Random seed for the split, initialisation and training.")]


def named_network(
    model: str, size: int | None, classes: int, trust_code: bool, *, keep_head: bool = False, weights: str | None = None
) -> nn.Module:
    """The network in a folder, or a new one by name, with a head for that many classes or its own."""
    from basisprune.errors import ModelError
    from basisprune.runs.load import FileModel, load_any
    from basisprune.transfer.model import transfer_model

    if not Path(model).exists():
        if keep_head:
            from basisprune.transfer.hints import Hints
            from basisprune.transfer.kept import kept_model

            return kept_model(model, weights=weights, input_hints=Hints(None if size is None else (size, size)))
        return transfer_model(model, classes, weights=weights, input_size=size)
    network = load_any(model, trust_remote_code=trust_code).model
    if isinstance(network, FileModel):
        raise ModelError(f"{model}: the layers of an exported file cannot be listed; pass the model/ folder next to it")
    return network
