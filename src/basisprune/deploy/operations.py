"""The operations that a graph out of a file may name, and the function that does each.

A file gives a name, a table gives the function: nothing is looked up on a value by a name. Each function was read for
what it does with odd arguments: it computes tensors and numbers from its arguments alone; what it can cost is bounded
by `deploy/bundle/limits.py`. None takes a callable, a path, a device or a place to write to (`out`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from basisprune.errors import LayerError

_OF_TENSORS = (
    *("abs", "add", "cat", "chunk", "clamp", "concat", "div", "exp", "flatten", "log", "matmul", "max", "maximum"),
    *("mean", "min", "minimum", "movedim", "mul", "neg", "permute", "pow", "reciprocal", "relu", "reshape", "roll"),
    *("rsqrt", "sigmoid", "softmax", "split", "sqrt", "square", "squeeze", "stack", "std", "sub", "sum", "tanh"),
    *("transpose", "unbind", "unsqueeze", "var", "cos", "cumsum", "einsum", "sin", "swapaxes", "unflatten"),
)
_OF_LAYERS = (
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d", "avg_pool1d"),
    *("avg_pool2d", "avg_pool3d", "dropout", "elu", "gelu", "glu", "hardsigmoid", "hardswish", "hardtanh"),
    *("interpolate", "layer_norm", "leaky_relu", "log_softmax", "max_pool1d", "max_pool2d", "max_pool3d", "mish"),
    *("normalize", "pad", "pixel_shuffle", "pixel_unshuffle", "relu", "relu6", "scaled_dot_product_attention", "selu"),
    *("sigmoid", "silu", "softmax", "softplus", "tanh", "conv1d", "conv2d", "conv3d", "linear"),
)
_OF_NUMBERS = ("add", "eq", "floordiv", "getitem", "iadd", "imul", "matmul", "mod", "mul", "neg", "sub", "truediv")
_OF_TENSORS_ALONE = (
    *("add_", "clamp_", "contiguous", "dim", "div_", "expand", "expand_as", "mul_", "relu_", "sigmoid_", "size"),
    *("reshape_as", "sub_", "t", "view", "view_as"),
)
KEYWORDS = frozenset({
    *("align_corners", "alpha", "antialias", "approximate", "attn_mask", "axis0", "axis1", "beta", "bias"),
    *("ceil_mode", "chunks", "correction", "count_include_pad", "dilation", "dim", "dim0", "dim1", "dims"),
    *("divisor_override", "downscale_factor", "dropout_p", "dtype", "enable_gqa", "end_dim", "eps", "equation"),
    *("exponent", "groups", "inplace", "input", "is_causal", "keepdim", "kernel_size", "key", "max", "max_val"),
    *("min", "min_val", "mode", "negative_slope", "normalized_shape", "other", "output_size", "p", "pad"),
    *("padding", "query", "recompute_scale_factor", "return_indices", "rounding_mode", "scale", "scale_factor"),
    *("shape", "shifts", "size", "sizes", "split_size", "split_size_or_sections", "start_dim", "stride"),
    *("tensor", "tensors", "threshold", "training", "unbiased", "upscale_factor", "value", "weight"),
    "_stacklevel",
})  # fmt: skip
"""The arguments that functions and methods may be given by name; `out` is not among them, unless it is None."""


@dataclass(frozen=True)
class Method:
    """A method of tensors, called by what it is and not by its name."""

    name: str
    function: Callable[..., object]

    def __call__(self, *args: object, **kwargs: object) -> object:
        """What the method gives for the tensor that is its first argument; LayerError for anything else."""
        if isinstance(args[0] if args else None, fx.Proxy):
            proxy: fx.Proxy = args[0]  # type: ignore[assignment]
            return proxy.tracer.create_proxy("call_method", self.name, args, kwargs)
        _refuse_others(f"the method {self.name}", args)
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Reading:
    """An attribute of a tensor, read by a function of its own."""

    name: str
    function: Callable[[Tensor], object]

    def __call__(self, *args: object) -> object:
        """What the tensor that is its only argument says; LayerError for anything else."""
        if not isinstance(args[0] if args else None, fx.Proxy):
            _refuse_others(f"the attribute {self.name}", args)
        return self.function(*args)  # type: ignore[arg-type]


def _refuse_others(what: str, args: tuple[object, ...]) -> None:
    if not args or not isinstance(args[0], Tensor):
        kind = type(args[0]).__name__ if args else "nothing"
        raise LayerError("", f"{what} is for tensors, and was asked of {kind}")


FUNCTIONS: Mapping[str, Callable[..., object]] = {
    **{f"torch.{name}": getattr(torch, name) for name in _OF_TENSORS},
    **{f"functional.{name}": getattr(F, name) for name in _OF_LAYERS},
    **{f"operator.{name}": getattr(operator, name) for name in _OF_NUMBERS},
}
METHODS: Mapping[str, Method] = {
    name: Method(name, getattr(Tensor, name))
    for name in (*_OF_TENSORS_ALONE, *_OF_TENSORS)
    if name not in ("cat", "concat", "einsum", "stack")
}
READINGS: Mapping[str, Reading] = {
    "shape": Reading("shape", lambda tensor: tensor.shape),
    "ndim": Reading("ndim", lambda tensor: tensor.ndim),
    "dtype": Reading("dtype", lambda tensor: tensor.dtype),
    "device": Reading("device", lambda tensor: tensor.device),
}
NAMES: Mapping[Callable[..., object], str] = {function: name for name, function in reversed([*FUNCTIONS.items()])}


def odd_keywords(kwargs: Mapping[str, object]) -> list[str]:
    """The arguments among these that no function or method may be given; torch notes some as None."""
    return sorted(name for name, value in kwargs.items() if name not in KEYWORDS and value is not None)


ARITHMETIC = frozenset(FUNCTIONS[f"operator.{name}"] for name in _OF_NUMBERS if name != "getitem")
