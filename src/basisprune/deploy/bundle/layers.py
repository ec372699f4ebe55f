"""The classes of layers that a bundle may name, and what it may say of them.

How the list was made: the layers of torch.nn and timm.layers that occur in the networks of timm 1.0 and torchvision
0.30, and their nearest relatives. Of each the constructor and `forward` were read for what they do with odd numbers and
texts: they compute tensors and build other layers; texts are compared, or looked up in tables of activations and norms;
nothing is imported, evaluated, opened, or taken from an object by a name in an attribute. Left out are losses,
recurrent layers (they look their weights up by names in an attribute), transformers with callables, lazy and parallel
layers, and layers that need a network to build them. A new class goes through the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import get_args

from timm import layers
from torch import Tensor, nn

from basisprune.basis.layers import BasisPair, BasisScalingConv, Shift
from basisprune.deploy.bundle.values import Plain, is_plain
from basisprune.deploy.folded import LAYER_ATTRIBUTES
from basisprune.errors import BundleError
from basisprune.transfer.kept import LOGITS, KeptModel
from basisprune.transfer.model import GlobalPool, Layout, TransferModel
from basisprune.transfer.norms import NormedConv

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
NAMES: Mapping[type[nn.Module], str] = {kind: name for name, kind in CLASSES.items()}

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


def class_of(name: str) -> type[nn.Module]:
    """The class that a file calls so; raises BundleError for any that is not in the list."""
    kind = CLASSES.get(name)
    if kind is None:
        raise BundleError(f"{name[:80]!r} is not a class that a bundle may name; allowed are listed layers only")
    return kind


def check_arguments(name: str, given: Mapping[str, Plain]) -> None:
    """Raises BundleError for numbers that no layer of such a network is built with."""
    leaves = list(_named_leaves(given))
    if any(isinstance(leaf, int) and abs(leaf) > _LARGEST for _, leaf in leaves):
        raise BundleError(f"{name}: is built with numbers beyond {_LARGEST:,}")
    texts = [(argument, leaf) for argument, leaf in leaves if isinstance(leaf, str)]
    if any(argument not in _TEXT_ARGUMENTS or not _WORD.fullmatch(leaf) for argument, leaf in texts):
        raise BundleError(f"{name}: is built with a text that is no name of an activation, a norm or a mode")
    taps = given.get("filt_size", 0)  # a binomial filter, computed in Python
    if not isinstance(taps, int) or taps > _MOST_TAPS:
        raise BundleError(f"{name}: a filter has at most {_MOST_TAPS} taps")


def is_taken(module: nn.Module, name: str) -> bool:
    """Whether the module has something by that name already, in itself or in its class, which is not to be hidden."""
    return name in vars(module) or any(name in vars(kind) for kind in type(module).__mro__)


def may_be_set(module: nn.Module, name: str, value: object) -> bool:
    """Whether a file may give an attribute of a freshly built module this value: one that it has, of the same kind."""
    known = vars(module)
    if name in INTERNAL or name.startswith("__"):
        return False
    if isinstance(module, KeptModel) and name == "part":
        return value in (None, LOGITS)
    added = next((names for kind, names in _ADDED.items() if type(module) is kind), {})
    if name not in known and name not in added:
        return False
    before = known.get(name, added.get(name))
    if isinstance(value, str):
        return value == before or value in _TEXTS.get(name, ())
    return _numbers(value) and (_numbers(before) or (name in _TEXTS and name != "layout"))


def may_alias(module: nn.Module, name: str) -> bool:
    """Whether a file may let a plain attribute be a tensor of the network: where one was, or as `answer_like` does."""
    return isinstance(vars(module).get(name), Tensor) or (type(module) is nn.Sequential and name == "weight")


def _numbers(value: object) -> bool:
    """Whether the value is None, a number that is not too large, or a sequence of these."""
    return is_plain(value) and all(
        leaf is None or isinstance(leaf, float) or (isinstance(leaf, int) and abs(leaf) <= _LARGEST)
        for leaf in _leaves(value)
    )


def _named_leaves(given: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield each text and number with the name of the argument, or of the entry in it, that it is given for."""
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _named_leaves(value)
        else:
            yield from ((name, leaf) for leaf in _leaves(value))


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
