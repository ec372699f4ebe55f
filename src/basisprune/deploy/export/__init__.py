"""Networks as files for other runtimes; `runtimes.py` has the table of them."""

from basisprune.deploy.export.writing import (
    Agreement,
    Exported,
    OnnxReport,
    evaluate_onnx,
    export,
    export_onnx,
    export_program,
)

__all__ = ["Agreement", "Exported", "OnnxReport", "evaluate_onnx", "export", "export_onnx", "export_program"]
