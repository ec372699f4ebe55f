"""Counts what must stay small in the package; fails with a list where a limit is broken.

Usage: python tools/count.py [PACKAGE]
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "basisprune"
ANY_LINES, PARAMETERS, FLAT_FILES, FILE_LINES, FUNCTION_LINES = 118, 8, 20, 450, 80
LINES, FILES, NAMES, REACHED = 37_247, 174, 45, 133
"""Of the package, and of what `compress` imports: lower them whenever there is less, until 25,000, 170, 45 and 120."""
ROAD = "runs/compress.py"
COMMAND_LINE = "cli"  # where each parameter is an option with its help

Function = ast.FunctionDef | ast.AsyncFunctionDef
_ANY = re.compile(r"\bAny\b")
_NAME_OF_FRAMEWORK = re.compile(
    r"""(startswith|removeprefix)\(\s*["']basis|framework\w*\.(startswith|removeprefix)\("""
)


@dataclass(frozen=True)
class Count:
    """How much there is of something, how much there may be, and the places to look at where it is too much."""

    what: str
    found: int
    limit: int
    places: tuple[str, ...]

    @property
    def is_broken(self) -> bool:
        """Whether it is too much."""
        return self.found > self.limit

    def __str__(self) -> str:
        line = f"{'TOO MUCH' if self.is_broken else 'ok':8}{self.found:5} of at most {self.limit:3}  {self.what}"
        return "\n".join([line, *(f"{'':8}{place}" for place in self.places if self.is_broken)])


@dataclass(frozen=True)
class Source:
    """A file of the package, its path from there."""

    path: Path
    text: str

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Where each line is, and the line."""
        return [(f"{self.path}:{number}", line) for number, line in enumerate(self.text.splitlines(), 1)]

    @property
    def functions(self) -> list[Function]:
        """All functions and methods, inner ones too."""
        return [node for node in ast.walk(ast.parse(self.text)) if isinstance(node, Function)]

    @property
    def is_command_line(self) -> bool:
        """Whether its parameters are options of the command line."""
        return self.path.parts[0] == COMMAND_LINE


def read(package: Path) -> list[Source]:
    """All files of the package, sorted by their paths."""
    return [
        Source(path.relative_to(package), path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))
    ]


def counts(sources: list[Source]) -> list[Count]:
    """All that is counted."""
    return [
        lines_with_any(sources),
        wide_functions(sources),
        names_of_frameworks(sources),
        flat_files(sources),
        longest_file(sources),
        longest_function(sources),
        Count("lines in the package", sum(len(each.lines) for each in sources), LINES, ()),
        Count("files in the package", len(sources), FILES, ()),
        Count("files that compress imports", len(reached(sources, ROAD)), REACHED, ()),
        Count("public names", len(public_names()), NAMES, ()),
    ]


def public_names() -> list[str]:
    """The names that the package has at its top."""
    return re.findall(r"^from \S+ import \w+ as (\w+)$", (PACKAGE / "__init__.pyi").read_text(), re.MULTILINE)


def reached(sources: list[Source], start: str) -> set[str]:
    """The files that a file imports, and those that these import, at their top."""
    trees = {source.path.as_posix(): ast.parse(source.text) for source in sources}
    found: set[str] = set()
    waiting = [start] if start in trees else []
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [name for node in trees[path].body for name in _files_of(node) if name in trees]
    return found


def _files_of(node: ast.stmt) -> list[str]:
    """The files that a statement may import, of modules and of packages."""
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(PACKAGE.name):
        return []
    module = (node.module or "").removeprefix(PACKAGE.name).strip(".").replace(".", "/")
    names = [module, *(f"{module}/{alias.name}".strip("/") for alias in node.names)]
    return [path for name in names for path in (f"{name}.py", f"{name}/__init__.py".lstrip("/"))]


def lines_with_any(sources: list[Source]) -> Count:
    """The lines that mention Any; the places are the files, those with the most first."""
    found = {source.path: sum(bool(_ANY.search(line)) for _, line in source.lines) for source in sources}
    ranked = sorted(((number, path) for path, number in found.items() if number), key=lambda pair: (-pair[0], pair[1]))
    places = tuple(f"{path}: {number}" for number, path in ranked)
    return Count("lines that mention Any", sum(found.values()), ANY_LINES, places)


def wide_functions(sources: list[Source]) -> Count:
    """The functions with too many parameters, but for those of the command line."""
    places = tuple(
        f"{source.path}:{function.lineno}: {function.name} has {parameters_of(function)}"
        for source in sources
        if not source.is_command_line
        for function in source.functions
        if parameters_of(function) > PARAMETERS
    )
    return Count(f"functions with more than {PARAMETERS} parameters outside of cli/", len(places), 0, places)


def names_of_frameworks(sources: list[Source]) -> Count:
    """The lines that find out from a framework's name what it does."""
    places = tuple(
        f"{place}: {line.strip()}"
        for source in sources
        for place, line in source.lines
        if _NAME_OF_FRAMEWORK.search(line)
    )
    return Count("lines that parse the name of a framework", len(places), 0, places)


def flat_files(sources: list[Source]) -> Count:
    """The files that lie in no folder of the package, but for those that Python asks for by name."""
    places = tuple(
        str(source.path) for source in sources if len(source.path.parts) == 1 and not source.path.stem.startswith("__")
    )
    return Count("files flat in the package", len(places), FLAT_FILES, places)


def longest_file(sources: list[Source]) -> Count:
    """The lines of the longest file; the places are all files that are too long."""
    return _longest("lines in the longest file", [(len(each.lines), str(each.path)) for each in sources], FILE_LINES)


def longest_function(sources: list[Source]) -> Count:
    """The lines of the longest function, without the signature for the command line; the places are all too long."""
    sizes = []
    for source in sources:
        for function in source.functions:
            first = function.body[0].lineno if source.is_command_line else function.lineno
            size = (function.end_lineno or first) - first + 1
            sizes.append((size, f"{source.path}:{function.lineno}: {function.name}"))
    return _longest("lines in the longest function", sizes, FUNCTION_LINES)


def parameters_of(function: Function) -> int:
    """How many parameters it has, starred ones too, but for self and cls."""
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
    return sum(each.arg not in ("self", "cls") for each in every)


def _longest(what: str, sizes: list[tuple[int, str]], limit: int) -> Count:
    ranked = sorted(sizes, reverse=True)
    places = tuple(f"{place}: {size}" for size, place in ranked if size > limit)
    return Count(what, ranked[0][0] if ranked else 0, limit, places)


def main(arguments: list[str]) -> int:
    """Prints all counts; 1 where one is too much."""
    found = counts(read(Path(arguments[0]) if arguments else PACKAGE))
    print("\n".join(map(str, found)))
    return int(any(count.is_broken for count in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
