"""Networks for other runtimes: ONNX files, and programs of torch.export."""

from basisprune.deploy.export.evaluating import evaluate_onnx
from basisprune.deploy.export.onnx import OnnxReport, export_onnx
from basisprune.deploy.export.torch_export import export_program

__all__ = ["OnnxReport", "evaluate_onnx", "export_onnx", "export_program"]
