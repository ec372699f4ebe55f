"""Networks for other runtimes: ONNX files, and programs of torch.export."""

from basisprune.export.evaluating import evaluate_onnx
from basisprune.export.onnx import OnnxReport, export_onnx
from basisprune.export.torch_export import export_program

__all__ = ["OnnxReport", "evaluate_onnx", "export_onnx", "export_program"]
