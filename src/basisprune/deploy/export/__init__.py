"""Networks for other runtimes, one file each; `runtimes.py` has the table of them."""

from basisprune.deploy.export.evaluating import evaluate_onnx
from basisprune.deploy.export.onnx import OnnxReport, export_onnx
from basisprune.deploy.export.torch_export import export_program
from basisprune.deploy.export.writing import Exported, export

__all__ = ["Exported", "OnnxReport", "evaluate_onnx", "export", "export_onnx", "export_program"]
