"""Numbers -> text for people."""

from basisprune.report.text import framework_table, layer_table

__all__ = ["framework_table", "layer_table"]
