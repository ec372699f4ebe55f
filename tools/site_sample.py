"""A hook of the docs site: the report of the demo's run is its page sample-report.html, rendered at build time."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from basisprune.report.html import render_report
from basisprune.results import RunSummary

SUMMARY = Path("benchmarks") / "results" / "demo_summary.json"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the page, if a run of the demo is recorded."""
    summary = Path(config.config_file_path).parent / SUMMARY
    if summary.exists():
        page = render_report(RunSummary.read(summary))
        files.append(File.generated(config, "sample-report.html", content=page))
    return files
