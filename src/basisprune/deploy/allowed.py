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

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast, get_args

import torch
from timm import layers
from torch import Tensor, fx, nn
from torch.nn import functional as F

from basisprune.basis.layers import BasisPair, BasisScalingConv, Shift
from basisprune.errors import BundleError, LayerError
from basisprune.transfer.body import NormedConv
from basisprune.transfer.model import LOGITS, GlobalPool, KeptModel, Layout, TransferModel

# ----------------------------------------------------------------------------------------------- layers

_TORCH = """
    Module Sequential ModuleList ModuleDict Identity Linear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d
    ConvTranspose3d Embedding MultiheadAttention BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm GroupNorm
    LayerNorm RMSNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d LocalResponseNorm ReLU ReLU6 LeakyReLU PReLU
    RReLU ELU CELU SELU GELU GLU SiLU Mish Sigmoid LogSigmoid Hardsigmoid Hardswish Hardtanh Hardshrink Softshrink
    Softplus Softsign Softmax Softmax2d Softmin LogSoftmax Tanh Tanhshrink Threshold AdaptiveAvgPool1d
    AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d AvgPool1d AvgPool2d
    AvgPool3d MaxPool1d MaxPool2d MaxPool3d LPPool1d LPPool2d LPPool3d ZeroPad1d ZeroPad2d ZeroPad3d ConstantPad1d
    ConstantPad2d ConstantPad3d ReflectionPad1d ReflectionPad2d ReflectionPad3d CircularPad1d CircularPad2d
    CircularPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d Dropout Dropout1d Dropout2d Dropout3d
    AlphaDropout FeatureAlphaDropout Flatten Unflatten Fold Unfold PixelShuffle PixelUnshuffle ChannelShuffle
    Upsample UpsamplingBilinear2d UpsamplingNearest2d CosineSimilarity PairwiseDistance
"""
_TIMM = """
    Linear Conv2dSame CondConv2d StdConv2d StdConv2dSame ScaledStdConv2d ScaledStdConv2dSame SeparableConv2d
    SeparableConvNormAct ConvNormAct ConvMlp SplitAttn SelectiveKernel BatchNormAct2d
    FrozenBatchNormAct2d GroupNorm GroupNorm1 GroupNormAct GroupNorm1Act LayerNorm LayerNorm2d LayerNormFp32
    LayerNorm2dFp32 LayerNormAct LayerNormAct2d LayerNormActFp32 LayerNormAct2dFp32 RmsNorm RmsNorm2d RmsNormFp32
    RmsNorm2dFp32 RmsNormAct RmsNormAct2d RmsNormActFp32 RmsNormAct2dFp32 SimpleNorm SimpleNorm2d SimpleNormFp32
    SimpleNorm2dFp32 EvoNorm2dB0 EvoNorm2dB1 EvoNorm2dB2 EvoNorm2dS0 EvoNorm2dS0a EvoNorm2dS1 EvoNorm2dS1a
    EvoNorm2dS2 EvoNorm2dS2a FilterResponseNormAct2d FilterResponseNormTlu2d GELU GELUTanh QuickGELU Sigmoid Tanh
    Swish Mish HardSwish HardSigmoid HardMish PReLU AdaptiveAvgMaxPool2d SelectAdaptivePool2d AvgPool2dSame
    BlurPool2d LsePlus1d LsePlus2d SimPool1d SimPool2d SpaceToDepth DepthToSpace ClassifierHead
    NormMlpClassifierHead ClNormMlpClassifierHead Mlp GluMlp GatedMlp SwiGLU GlobalResponseNormMlp Attention
    AttentionRope Attention2d MultiQueryAttention2d MultiQueryAttentionV2 AttentionPoolLatent AttentionPool2d
    RotAttentionPool2d NonLocalAttn BatNonLocalAttn GlobalContext GatherExcite SEModule EffectiveSEModule EcaModule
    CecaModule PatchEmbed PatchEmbedWithSize RelPosBias RelPosBiasTf RelPosMlp RotaryEmbedding RotaryEmbeddingCat
    RotaryEmbeddingMixed RotaryEmbeddingDinoV3 FourierEmbed LayerScale LayerScale2d DropPath DropBlock2d
"""
OURS: tuple[type[nn.Module], ...] = (BasisPair, BasisScalingConv, GlobalPool, NormedConv, Shift, TransferModel)
CLASSES: Mapping[str, type[nn.Module]] = {
    **{f"torch.nn.{name}": getattr(nn, name) for name in _TORCH.split()},
    **{f"timm.layers.{name}": getattr(layers, name) for name in _TIMM.split()},
    **{f"basisprune.{kind.__name__}": kind for kind in OURS},
}
CLASS_NAMES: Mapping[type[nn.Module], str] = {kind: name for name, kind in CLASSES.items()}

_READ = "in_channels kernel_size stride padding dilation groups padding_mode transposed output_padding in_features"
LAYER_ATTRIBUTES = tuple(_READ.split())
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
_MAY_BE_TEXT = """
    aa_layer act_layer approximate drop_layer gate_layer grid_indexing input_fmt layout mode norm_layer
    normalize_coords output_fmt pad_mode padding padding_mode pool_type pos_embed rope_type
"""
_TEXT_ARGUMENTS = frozenset(_MAY_BE_TEXT.split())
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

_OF_TENSORS = """
    abs add amax amin baddbmm bitwise_not bmm broadcast_to cat ceil chunk clamp concat div eq erf exp flatten flip
    floor ge gt le log logical_and logical_not logical_or lt masked_fill matmul max maximum mean min minimum movedim
    mul ne neg permute pow reciprocal relu reshape roll round rsqrt sigmoid softmax split sqrt square squeeze stack
    std sub sum t tanh transpose unbind unsqueeze var where cos cumsum einsum sin swapaxes unflatten ones_like
    zeros_like
"""
_OF_LAYERS = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d avg_pool1d avg_pool2d avg_pool3d
    dropout elu gelu glu group_norm hardsigmoid hardswish hardtanh instance_norm interpolate layer_norm leaky_relu
    log_softmax max_pool1d max_pool2d max_pool3d mish normalize pad pixel_shuffle pixel_unshuffle relu relu6
    scaled_dot_product_attention selu sigmoid silu softmax softplus tanh conv1d conv2d conv3d linear
"""
_OF_NUMBERS = """
    add eq floordiv ge getitem gt iadd imul le lt matmul mod mul ne neg sub truediv
"""
_OF_TENSORS_ALONE = """
    add_ bool clamp_ clone contiguous detach dim div_ expand expand_as float long masked_fill_ mul_ narrow new_full
    new_ones new_zeros numel relu_ repeat repeat_interleave reshape_as select sigmoid_ size sub_ tile to type_as
    view view_as
"""
_OF_SIZES = "arange full linspace ones zeros"
_KEYWORDS = """
    align_corners alpha antialias approximate attn_mask axis0 axis1 beta bias ceil_mode chunks correction
    count_include_pad device dilation dim dim0 dim1 dims divisor_override downscale_factor dropout_p dtype
    enable_gqa end end_dim eps equation exponent fill_value groups indexing inplace input is_causal keepdim
    kernel_size key max max_val min min_val mode negative_slope normalized_shape other output_size p pad padding
    query recompute_scale_factor repeats return_indices rounding_mode scale scale_factor shape shifts size sizes
    split_size split_size_or_sections start start_dim step stride tensor tensors threshold training unbiased
    upscale_factor value weight _stacklevel
"""
KEYWORDS = frozenset(_KEYWORDS.split())
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


class OtherSizeError(LayerError):
    """An input of another size than those that a graph is right for."""


def expect(value: object, known: bool | int | float) -> object:
    """Raise OtherSizeError unless the number, or the length, is the one by which the network's code once decided."""
    if issubclass(type(value), fx.Proxy):  # by its type, because it may call itself a number
        proxy = cast(fx.Proxy, value)
        return proxy.tracer.create_proxy("call_function", expect, (proxy, known), {})
    found = len(value) if isinstance(value, (tuple, list, Tensor)) else value
    if (bool(found) if isinstance(known, bool) else found) != known:
        raise OtherSizeError("", f"is written down for inputs of another size ({found} in place of {known})")
    return None


def set_item(tensor: Tensor, index: object, value: object) -> None:
    """Set a part of a tensor that the graph has made."""
    Operation("setitem", operator.setitem)(tensor, index, value)


def _to(tensor: Tensor, *kinds: object, **named: object) -> Tensor:
    """Convert to a type, or to that of another tensor; a place has no name in a file."""
    if any(isinstance(kind, str) for kind in (*kinds, *named.values())):
        raise LayerError("", "to: a place is named")
    return cast(Tensor, Tensor.to(tensor, *kinds, **named))  # type: ignore[call-overload]


CREATING = frozenset({*(getattr(torch, name) for name in _OF_SIZES.split()), torch.empty})
"""What makes a tensor of nothing but numbers."""

FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "basisprune.expect": expect,
    "basisprune.set_item": set_item,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "torch.meshgrid": torch.meshgrid,
    "torch._weight_norm": torch._weight_norm,
    **{f"torch.{name}": getattr(torch, name) for name in _OF_SIZES.split()},
    **{f"torch.{name}": getattr(torch, name) for name in _OF_TENSORS.split()},
    **{f"functional.{name}": getattr(F, name) for name in _OF_LAYERS.split()},
    **{f"operator.{name}": getattr(operator, name) for name in _OF_NUMBERS.split()},
}
METHODS: Mapping[str, Operation] = {
    name: Operation(name, _to if name == "to" else getattr(Tensor, name))
    for name in f"{_OF_TENSORS_ALONE} {_OF_TENSORS}".split()
    if hasattr(Tensor, name)
}
READINGS: Mapping[str, Operation] = {
    "shape": Operation("shape", lambda tensor: tensor.shape),
    "ndim": Operation("ndim", lambda tensor: tensor.ndim),
    "dtype": Operation("dtype", lambda tensor: tensor.dtype),
    "device": Operation("device", lambda tensor: tensor.device),
}
FUNCTION_NAMES: Mapping[Callable[..., object], str] = {
    function: name for name, function in reversed([*FUNCTIONS.items()])
} | {torch.empty: "torch.zeros", operator.pow: "torch.pow", operator.invert: "torch.bitwise_not"}
ARITHMETIC = frozenset(
    [math.ceil, math.floor, *(FUNCTIONS[f"operator.{name}"] for name in _OF_NUMBERS.split() if name != "getitem")]
)


def odd_keywords(kwargs: Mapping[str, object]) -> list[str]:
    """The arguments that no function or method may be given by name; torch notes some as None."""
    return sorted(name for name, value in kwargs.items() if name not in KEYWORDS and value is not None)
