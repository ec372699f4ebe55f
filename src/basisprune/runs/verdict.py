"""What a run says of its files: what is promised of the ONNX files, and which are missing, in verdict and headline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from basisprune.budget.certify import Status
from basisprune.results import DeliveredFile, RunSummary
from basisprune.runs.output import BUNDLE, INT8, ONNX

ONNX_FILES = (ONNX, INT8)
_LONGEST = 400  # letters of a reason


def promise_of(name: str, summary: RunSummary, *, certified: bool = False) -> Status | None:
    """What is promised of a file; None where nothing is, and of the unpruned network itself.

    Nothing is promised where the budget is not about accuracy, and of files for other runtimes than ONNX's.
    """
    if summary.certificate is None or name not in ONNX_FILES:
        return None
    if name == ONNX and summary.candidates and summary.candidates[0].chosen:
        return None
    return "certified" if certified else "estimated"


def with_promises(summary: RunSummary) -> RunSummary:
    """The summary whose verdict and headline also say what its files do not keep to; each is said once."""
    short = {name: summary.files[name] for name in ONNX_FILES if name in summary.files}
    short = {name: about for name, about in short.items() if about.promise == "estimated"}
    said, head = summary.verdict, summary.headline
    is_certified = summary.certificate is not None and summary.certificate.certified
    for name, about in short.items():
        if about.fault or is_certified:
            start, rest = _sentence(name, about)
            said = said if start in said else f"{said} {start}{rest}."
        if is_certified and head and f"{name} is not" not in head and head != summary.verdict:
            head = f"{head}; {name} is not"
    return replace(summary, verdict=said, headline=said if head == summary.verdict else head)


def with_missing(summary: RunSummary, remedies: Sequence[str]) -> RunSummary:
    """The summary whose verdict says that there is no bundle, and first of all if there is no file to use at all.

    `remedies` are what would help.
    """
    if BUNDLE in summary.files or BUNDLE not in summary.not_written:
        return summary
    head, said = summary.headline, summary.verdict
    why = " ".join(f"{name}: {_ended(reason)}" for name, reason in summary.not_written.items())
    if not summary.is_undelivered:
        told = f"{said} There is no bundle ({BUNDLE}/) of this network: {_ended(summary.not_written[BUNDLE])}"
        return replace(summary, verdict=told, headline=told if head == said else head)
    first = f"No deployable file could be written: there is neither a bundle ({BUNDLE}/) nor {ONNX}."
    told = f"{first} {said} Why not: {why} What would help: {'; '.join(remedies)}."
    return replace(summary, verdict=told, headline=told if head == said else f"No deployable file; {head}")


def _ended(reason: str) -> str:
    """A reason on one line, as a sentence."""
    line = " ".join(reason.split())
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."
    return line if line.endswith(".") else f"{line}."


def _sentence(name: str, about: DeliveredFile) -> tuple[str, str]:
    """How the sentence about a file begins, by which it is known again, and how it goes on."""
    if about.fault:
        return f"Warning: {name} is not within the budget", f": {about.fault}"
    return f"{name} is estimated, not certified", "" if about.test is None else ": its test failed"
