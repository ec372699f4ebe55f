"""All networks of the matrix, one process each; the records as they come, and the page made from them."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import resource
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORDS = HERE / "results" / "matrix.jsonl"
STACKS = HERE / "results" / "stacks.jsonl"
PAGE = HERE.parent / "docs" / "coverage.md"
STEPS = ("exact", "basis", "double", "onnx")
STACK_BAR = 60  # bundles
STACK_STEPS = ("exact", "filters", "fold", "bundle")
BARS = {
    "torchvision": {"basis": 1.0, "double": 0.95, "onnx": 0.95},
    "timm": {"basis": 0.98, "double": 0.95, "onnx": 0.95},
}
SECONDS = 2400.0
MEMORY = 9 << 30  # bytes of one process

Record = dict[str, Any]


def run_all(*, again: bool, only: Sequence[str]) -> None:
    """Appends the record of each network that has none; with `again`, of those too that failed a step."""
    import matrix  # its imports take a while, and every process inherits them
    import matrix_networks

    _run(matrix_networks.all_networks(), matrix.examine, RECORDS, STEPS, again=again, only=only)


def run_stacks(*, again: bool, only: Sequence[str]) -> None:
    """The same for the networks of other libraries."""
    import matrix
    import matrix_stacks

    networks: list[tuple[str, str, dict[str, str]]] = [(*key.split("/", 1), {}) for key in matrix_stacks.NETWORKS]  # type: ignore[misc]
    _run(networks, matrix.examine_stack, STACKS, STACK_STEPS, again=again, only=only)


def _run(
    networks: Sequence[tuple[str, str, dict[str, str]]],
    work: Any,
    records: Path,
    steps: Sequence[str],
    *,
    again: bool,
    only: Sequence[str],
) -> None:
    for library, name, about in networks:
        key = f"{library}/{name}"
        before = latest(records).get(key)  # another run may have been here
        wanted = key in only if only else before is None or (again and not holds(before, steps))
        if not wanted:
            continue
        record = {"library": library, "name": name, **about, **_in_process(work, library, name)}
        record["versions"] = versions()
        with records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        faults = {step: record.get(step, "") for step in ("skipped", "build", *steps) if record.get(step) is not True}
        print(key, {step: fault for step, fault in faults.items() if fault} or "ok", file=sys.stderr, flush=True)


def latest(path: Path = RECORDS) -> dict[str, Record]:
    """The last record of each network."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {f"{record['library']}/{record['name']}": record for record in map(json.loads, lines)}


def holds(record: Record, steps: Iterable[str] = STEPS) -> bool:
    """Whether the network was skipped, or passed all these steps."""
    return "skipped" in record or all(record.get(step) is True for step in steps)


def _in_process(work: Any, library: str, name: str) -> Record:
    """What the work gives in a forked process with limits."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(work, library, name, writer))
    process.start()
    writer.close()
    record: Record = {}
    if reader.poll(SECONDS):
        try:
            record = reader.recv()
        except EOFError:
            process.join()
            record = {"build": f"the process ended with code {process.exitcode}"}
    else:
        record = {"build": f"more than {SECONDS:g} s"}
        process.kill()
    process.join()
    return record


def _child(work: Any, library: str, name: str, writer: Connection) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    writer.send(work(library, name))
    writer.close()
    os._exit(0)


def versions() -> dict[str, str]:
    """What the records were made with."""
    packages = ("torch", "timm", "torchvision", "onnxruntime")
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def write_page() -> None:
    """docs/coverage.md from the records."""
    import matrix_networks
    import matrix_page
    import matrix_stacks

    second = matrix_page.stacks(list(latest(STACKS).values()), len(matrix_stacks.NETWORKS), STACK_BAR)
    total = len(matrix_networks.timm_families()) + len(matrix_networks.torchvision_names())
    PAGE.write_text(matrix_page.page(list(latest().values()), BARS, total, second))


if __name__ == "__main__":
    write_page()
