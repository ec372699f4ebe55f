"""Numbers -> text for people."""

from basisprune.report.text import layer_table, stage_table

__all__ = ["layer_table", "stage_table"]
