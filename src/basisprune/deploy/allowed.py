"""All that a file may name: classes of layers and what it may set on them, functions, methods and keyword arguments.

A file gives a name, a table gives the class or function; nothing is looked up on a value by a name. The classes are
the layers of torch.nn and timm.layers in the networks of timm 1.0 and torchvision 0.30, and their nearest relatives.
Each entry was read for what it does with odd arguments: it computes tensors and numbers and builds other layers; texts
are compared or looked up in tables; nothing is imported, evaluated, opened or taken from an object by a name. What it
can cost is bounded by `bundle/limits.py`. Left out are losses, recurrent layers (they look their weights up by names in
an attribute), transformers with callables, lazy and parallel layers, layers that need a network to build them, and
functions that take a callable, a path, a device or a place to write to (`out`). A new entry goes through the same.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from timm import layers
from torch import Tensor, fx, nn
from torch.nn import functional as F

from basisprune.basis.layers import BasisPair, BasisScalingConv, Shift
from basisprune.errors import BundleError, LayerError
from basisprune.transfer.body import NormedConv
from basisprune.transfer.kept import LOGITS, KeptModel
from basisprune.transfer.model import GlobalPool, Layout, TransferModel

# ----------------------------------------------------------------------------------------------- layers

_TORCH: tuple[type[nn.Module], ...] = (
    *(nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity),
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.Embedding, nn.MultiheadAttention),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LocalResponseNorm),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.GLU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Hardshrink, nn.Softshrink, nn.Softplus),
    *(nn.Softsign, nn.Softmax, nn.Softmax2d, nn.Softmin, nn.LogSoftmax, nn.Tanh, nn.Tanhshrink, nn.Threshold),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    *(nn.AdaptiveMaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.LPPool1d, nn.LPPool2d, nn.LPPool3d),
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.Flatten, nn.Unflatten, nn.Fold, nn.Unfold, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
    *(nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d, nn.CosineSimilarity, nn.PairwiseDistance),
)
_TIMM: tuple[type[nn.Module], ...] = (
    *(layers.Linear, layers.Conv2dSame, layers.CondConv2d, layers.StdConv2d, layers.StdConv2dSame),
    *(layers.ScaledStdConv2d, layers.ScaledStdConv2dSame, layers.SeparableConv2d, layers.SeparableConvNormAct),
    *(layers.ConvNormAct, layers.ConvNormActAa, layers.ConvMlp, layers.SplitAttn, layers.SelectiveKernel),
    *(layers.BatchNormAct2d, layers.FrozenBatchNormAct2d, layers.GroupNorm, layers.GroupNorm1, layers.GroupNormAct),
    *(layers.GroupNorm1Act, layers.LayerNorm, layers.LayerNorm2d, layers.LayerNormFp32, layers.LayerNorm2dFp32),
    *(layers.LayerNormAct, layers.LayerNormAct2d, layers.LayerNormActFp32, layers.LayerNormAct2dFp32),
    *(layers.RmsNorm, layers.RmsNorm2d, layers.RmsNormFp32, layers.RmsNorm2dFp32, layers.RmsNormAct),
    *(layers.RmsNormAct2d, layers.RmsNormActFp32, layers.RmsNormAct2dFp32),
    *(layers.SimpleNorm, layers.SimpleNorm2d, layers.SimpleNormFp32, layers.SimpleNorm2dFp32),
    *(layers.EvoNorm2dB0, layers.EvoNorm2dB1, layers.EvoNorm2dB2, layers.EvoNorm2dS0, layers.EvoNorm2dS0a),
    *(layers.EvoNorm2dS1, layers.EvoNorm2dS1a, layers.EvoNorm2dS2, layers.EvoNorm2dS2a),
    *(layers.FilterResponseNormAct2d, layers.FilterResponseNormTlu2d),
    *(layers.GELU, layers.GELUTanh, layers.QuickGELU, layers.Sigmoid, layers.Tanh, layers.Swish, layers.Mish),
    *(layers.HardSwish, layers.HardSigmoid, layers.HardMish, layers.PReLU),
    *(layers.AdaptiveAvgMaxPool2d, layers.SelectAdaptivePool2d, layers.AvgPool2dSame, layers.BlurPool2d),
    *(layers.LsePlus1d, layers.LsePlus2d, layers.SimPool1d, layers.SimPool2d, layers.SpaceToDepth, layers.DepthToSpace),
    *(layers.ClassifierHead, layers.NormMlpClassifierHead, layers.ClNormMlpClassifierHead),
    *(layers.Mlp, layers.GluMlp, layers.GatedMlp, layers.SwiGLU, layers.GlobalResponseNormMlp),
    *(layers.Attention, layers.AttentionRope, layers.Attention2d, layers.MultiQueryAttention2d),
    *(layers.MultiQueryAttentionV2, layers.AttentionPoolLatent, layers.AttentionPool2d, layers.RotAttentionPool2d),
    *(layers.NonLocalAttn, layers.BatNonLocalAttn, layers.GlobalContext, layers.GatherExcite),
    *(layers.SEModule, layers.EffectiveSEModule, layers.EcaModule, layers.CecaModule),
    *(layers.PatchEmbed, layers.PatchEmbedWithSize, layers.RelPosBias, layers.RelPosBiasTf, layers.RelPosMlp),
    *(layers.RotaryEmbedding, layers.RotaryEmbeddingCat, layers.RotaryEmbeddingMixed, layers.RotaryEmbeddingDinoV3),
    *(layers.FourierEmbed, layers.LayerScale, layers.LayerScale2d, layers.DropPath, layers.DropBlock2d),
)
OURS: tuple[type[nn.Module], ...] = (BasisPair, BasisScalingConv, GlobalPool, NormedConv, Shift, TransferModel)
_SPACES = {"torch.nn": _TORCH, "timm.layers": _TIMM, "basisprune": OURS}
CLASSES: Mapping[str, type[nn.Module]] = {
    f"{space}.{kind.__name__}": kind for space, kinds in _SPACES.items() for kind in kinds
}
CLASS_NAMES: Mapping[type[nn.Module], str] = {kind: name for name, kind in CLASSES.items()}

LAYER_ATTRIBUTES = (
    *("in_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"),
    *("transposed", "output_padding", "in_features"),
)
"""What the code around a layer may read of it, and a container in its place has too."""
_LIKE_LAYERS = (*LAYER_ATTRIBUTES, "out_channels", "out_features")
_ADDED: Mapping[type[nn.Module], Mapping[str, object]] = {
    nn.Sequential: dict.fromkeys(_LIKE_LAYERS) | {"padding": "valid", "padding_mode": "zeros"},
    BasisScalingConv: {"groups": 1},
    GlobalPool: {"layout": "NCHW", "prefix_tokens": 0},
}
"""The attributes that a file may add to what the class alone makes, each with a value of its kind."""
_TEXTS: Mapping[str, frozenset[str]] = {
    "layout": frozenset(get_args(Layout)),
    "padding": frozenset({"valid", "same"}),
    "padding_mode": frozenset({"zeros", "reflect", "replicate", "circular"}),
}
"""The attributes that may become another text, and which."""
INTERNAL = frozenset(vars(nn.Module())) | {"input_spec", "source", "classes"}
_TEXT_ARGUMENTS = frozenset({
    "aa_layer", "act_layer", "approximate", "drop_layer", "gate_layer", "grid_indexing", "input_fmt", "layout", "mode",
    "norm_layer", "normalize_coords", "output_fmt", "pad_mode", "padding", "padding_mode", "pool_type", "pos_embed",
    "rope_type",
})  # fmt: skip
"""The arguments that may be text. Constructors compute with the others, and a text times a number is a long text."""
_LARGEST = 1 << 20
"""No layer has more channels or classes; sequences times such a number are still small."""
_MOST_TAPS = 64
_WORD = re.compile(r"[A-Za-z0-9_.-]{0,64}")


def check_arguments(name: str, given: Mapping[str, object]) -> None:
    """Raise BundleError for numbers and texts that no layer of such a network is built with."""
    for argument, value in given.items():
        for leaf in _leaves(value):
            if isinstance(leaf, int) and abs(leaf) > _LARGEST:
                raise BundleError(f"{name}: is built with numbers beyond {_LARGEST:,}")
            if isinstance(leaf, str) and (argument not in _TEXT_ARGUMENTS or not _WORD.fullmatch(leaf)):
                raise BundleError(f"{name}: is built with a text that is no name of an activation, a norm or a mode")
    taps = given.get("filt_size", 0)  # a binomial filter, computed in Python
    if not isinstance(taps, int) or taps > _MOST_TAPS:
        raise BundleError(f"{name}: a filter has at most {_MOST_TAPS} taps")


def is_taken(module: nn.Module, name: str) -> bool:
    """Whether the module or its class has something by that name, which is not to be hidden."""
    return name in vars(module) or any(name in vars(kind) for kind in type(module).__mro__)


def may_be_set(module: nn.Module, name: str, value: object) -> bool:
    """Whether a file may give an attribute of a new module this value: one that it has, of the same kind."""
    if name in INTERNAL or name.startswith("__"):
        return False
    if isinstance(module, KeptModel) and name == "part":
        return value in (None, LOGITS)
    known = {**_ADDED.get(type(module), {}), **vars(module)}
    if name not in known:
        return False
    if isinstance(value, str):
        return value == known[name] or value in _TEXTS.get(name, ())
    return _is_number(value) and (_is_number(known[name]) or (name in _TEXTS and name != "layout"))


def may_alias(module: nn.Module, name: str) -> bool:
    """Whether a file may let a plain attribute be a tensor of the network: where one was, or as `answer_like` does."""
    return isinstance(vars(module).get(name), Tensor) or (type(module) is nn.Sequential and name == "weight")


def _is_number(value: object) -> bool:
    """Whether the value is None, a number that is not too large, or a sequence of these."""
    if type(value) in (tuple, list, torch.Size):
        return all(map(_is_number, value))  # type: ignore[call-overload]
    return value is None or type(value) is float or (type(value) in (bool, int) and abs(value) <= _LARGEST)  # type: ignore[arg-type]


def _leaves(value: object) -> list[object]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, (tuple, list)) else [value]


# ------------------------------------------------------------------------------------------- operations

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
class Operation:
    """A method or an attribute of tensors: a function that is called with a tensor and nothing else comes first."""

    name: str
    function: Callable[..., object]

    def __call__(self, *args: object, **kwargs: object) -> object:
        subject = args[0] if args else None
        if isinstance(subject, fx.Proxy) and self.name in METHODS:
            return subject.tracer.create_proxy("call_method", self.name, args, kwargs)
        if not isinstance(subject, Tensor | fx.Proxy):
            raise LayerError("", f"{self.name} is for tensors, and was asked of {type(subject).__name__}")
        return self.function(*args, **kwargs)


FUNCTIONS: Mapping[str, Callable[..., object]] = {
    **{f"torch.{name}": getattr(torch, name) for name in _OF_TENSORS},
    **{f"functional.{name}": getattr(F, name) for name in _OF_LAYERS},
    **{f"operator.{name}": getattr(operator, name) for name in _OF_NUMBERS},
}
METHODS: Mapping[str, Operation] = {
    name: Operation(name, getattr(Tensor, name))
    for name in (*_OF_TENSORS_ALONE, *_OF_TENSORS)
    if name not in ("cat", "concat", "einsum", "stack")
}
READINGS: Mapping[str, Operation] = {
    "shape": Operation("shape", lambda tensor: tensor.shape),
    "ndim": Operation("ndim", lambda tensor: tensor.ndim),
    "dtype": Operation("dtype", lambda tensor: tensor.dtype),
    "device": Operation("device", lambda tensor: tensor.device),
}
FUNCTION_NAMES: Mapping[Callable[..., object], str] = {
    function: name for name, function in reversed([*FUNCTIONS.items()])
}
ARITHMETIC = frozenset(FUNCTIONS[f"operator.{name}"] for name in _OF_NUMBERS if name != "getitem")


def odd_keywords(kwargs: Mapping[str, object]) -> list[str]:
    """The arguments that no function or method may be given by name; torch notes some as None."""
    return sorted(name for name, value in kwargs.items() if name not in KEYWORDS and value is not None)
