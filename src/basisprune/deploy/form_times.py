"""How long the forms of a layer take, by a table of times instead of a stopwatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from basisprune.deploy.forms import plain_layers
from basisprune.joint_plan.times import LayerShape, Sides, TimeTable
from basisprune.torchkit.surgery import is_depthwise, output_channels
from basisprune.torchkit.watching import Dataflow


def conv_shape(conv: nn.Conv2d, size: Sides) -> LayerShape:
    """The shape of a conv that reads maps of this size.

    >>> str(conv_shape(nn.Conv2d(8, 8, 3, stride=2, groups=8), (16, 16)))
    '3x3 depthwise conv, stride 2, on maps of 16x16'
    """
    kernel, stride, dilation = ((side[0], side[1]) for side in (conv.kernel_size, conv.stride, conv.dilation))
    if is_depthwise(conv):
        return LayerShape("depthwise", kernel, stride, size, 1, dilation)
    return LayerShape("conv", kernel, stride, size, conv.groups, dilation)


def table_seconds(
    choices: Mapping[str, Sequence[nn.Module]], run: Dataflow, table: TimeTable
) -> dict[str, list[float]]:
    """The seconds of all forms of each layer, over all its calls; layers that the table does not know are left out."""
    found = {}
    for name, forms in choices.items():
        seconds = [_form_seconds(form, run, name, table) for form in forms]
        known = [value for value in seconds if value is not None]
        if len(known) == len(seconds) and run.calls.get(name):
            found[name] = known
    return found


def _form_seconds(form: nn.Module, run: Dataflow, name: str, table: TimeTable) -> float | None:
    total, parts = 0.0, list(plain_layers(form).values())
    for call in run.calls.get(name, []):
        sizes = ((call.shape[-2], call.shape[-1]), (call.output_shape[-2], call.output_shape[-1]))
        for part, size in zip(parts, sizes, strict=False):
            if not isinstance(part, nn.Conv2d) or len(call.shape) != 4:
                return None
            shape = conv_shape(part, size)
            if table.missing({name: shape}):
                return None
            total += float(table.seconds(shape, part.in_channels, output_channels(part)))
    return total
