"""A network to a folder or the hub, loaded and compared before it is there."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict

from pydantic import JsonValue
from safetensors.torch import save
from torch import Tensor, nn
from torch.fx import GraphModule
from typing_extensions import Unpack

from basisprune.data.arrays import told_apart
from basisprune.deploy.bundle.arguments import check_repo_id, check_saving
from basisprune.deploy.bundle.card import Card, model_card
from basisprune.deploy.bundle.config import KINDS, Architecture, Config, Input, Plan
from basisprune.deploy.bundle.files import CARD, PLANS, TENSORS, check_folder, read_folder, write_folder
from basisprune.deploy.bundle.graph import plain_steps
from basisprune.deploy.bundle.hub import HubFolder
from basisprune.deploy.bundle.loading import assemble, fresh_network, load_bundle
from basisprune.deploy.bundle.page import page_files
from basisprune.deploy.bundle.running import fingerprint, fixed_input, package_versions, run
from basisprune.deploy.bundle.structure import describe
from basisprune.deploy.bundle.tensors import collect_tensors
from basisprune.deploy.bundle.tracing import as_graph
from basisprune.deploy.comparing import alike, difference
from basisprune.deploy.folded import FoldedModel, untraced
from basisprune.errors import BundleError, ConfigError, LayerError
from basisprune.files import user_path
from basisprune.transfer.kept import KeptModel
from basisprune.transfer.model import ModelSource
from basisprune.types import InputSpec


class Saving(TypedDict, total=False):
    """What `save_pretrained` accepts besides the network and the folder."""

    classes: Sequence[str] | None
    metrics: Mapping[str, JsonValue] | None
    plans: Sequence[Plan]
    factory: str | None
    input_shape: Sequence[int] | None
    check_inputs: Sequence[Tensor]


@dataclass(frozen=True)
class _Form:
    """One way to write a network down: how it is built anew, as what, and what is built first.

    `graph` is the network that a list of operations stands for.
    """

    architecture: Architecture
    stored: nn.Module
    fresh: nn.Module | None = None
    graph: nn.Module | None = None


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    classes: Sequence[str] | None = None,
    metrics: Mapping[str, JsonValue] | None = None,
    plans: Sequence[Plan] = (),
    factory: str | None = None,
    input_shape: Sequence[int] | None = None,
    check_inputs: Sequence[Tensor] = (),
) -> Path:
    """The folder, which now holds the network as it is: dense, decomposed, pruned or folded.

    A network from `transfer_model` knows how to build its architecture anew from a timm name or
    `"package.module:factory"`; so does one of nothing but layers of torch.nn. A folded one whose code can be traced is
    written as a graph of such layers. For any other, `factory` is the timm name or function that builds its backbone
    (or the whole network, if it is not from `transfer_model`). Where a network that knows its function can be written
    down without it, it is, so that nobody has to trust one.
    `classes` are by default those that the network has as an attribute. `input_shape` is that of one input, for
    networks without an `input_spec`. `metrics` is anything that JSON can hold.

    What was written is loaded and compared with the network, bit for bit, in eval and in training mode, before it takes
    the place of an older bundle in the folder: on the batches `check_inputs`, which are best real ones, and on random
    ones of several sizes. Other files there stay. Raises BundleError or LayerError, and leaves the folder as it was, if
    the network cannot be saved; ConfigError for arguments that are wrong. The network is not changed.
    """
    check_saving(model, classes, metrics, plans, factory, input_shape, check_inputs)
    path = user_path(folder, "save_pretrained")
    check_folder(path)
    if any(tensor.device.type != "cpu" for tensor in (*model.parameters(), *model.buffers())):
        model = copy.deepcopy(model).cpu()  # comparing bit for bit needs one device for all
    known = _input(model, input_shape)
    output = run(model, fixed_input(model, known.shape))
    names = _checked_classes(getattr(model, "classes", None) if classes is None else classes, output)

    def write(form: _Form) -> Path:
        if form.graph is not None and not alike(output, run(form.graph, fixed_input(model, known.shape))):
            raise _another(f"for inputs {known.shape}, it differs")
        tensors, facts = collect_tensors(form.stored, form.fresh)
        config = Config(
            architecture=form.architecture,
            structure=describe(form.stored, form.fresh),
            tensors=facts,
            input=known,
            classes=names,
            metrics=dict(metrics or {}),
            versions=package_versions(),
            fingerprint=fingerprint(output),
        )
        card = model_card(config).encode()
        files = {TENSORS: save(tensors, {"format": "pt"}), PLANS: _plans_text(plans), CARD: card}
        return write_folder(path, config, files, lambda new: _check_bundle(new, path))

    def _check_bundle(new: Path, where: Path) -> None:
        bundle = assemble(read_folder(new), str(where), trust_remote_code=True)  # it is the caller's own
        _refuse_other(model, bundle.model, known, check_inputs)

    return _first_that_fits(_forms(model, factory, known), write)


def refuse_unsaveable(model: nn.Module, factory: str | None = None) -> None:
    """Raises BundleError or LayerError for a network that `save_pretrained` could not write down; writes nothing."""
    known = _input(model, None)

    def try_out(form: _Form) -> Path:
        describe(form.stored, form.fresh)
        if form.graph is not None:
            _refuse_other(model, form.graph, known)
        return Path()

    _first_that_fits(_forms(model, factory, known), try_out)


def push_to_hub(
    bundle: str | Path | nn.Module,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload a basisprune bundle",
    trust_remote_code: bool = False,
    card: Card | None = None,
    **saving: Unpack[Saving],
) -> str:
    """The address of the commit on the hub that holds the bundle: a folder that `save_pretrained` wrote, or a network.

    A network is saved with `saving`, the arguments of `save_pretrained`; a folder is loaded once, to be sure
    that others can, with `trust_remote_code` as `load_bundle` takes it. `card` is what only you know: the licence of
    the weights and the datasets. Where the network can be written as ONNX, `app.py`, `requirements.txt` and
    `model.onnx` go with it: a page for the browser that classifies photos.
    """
    check_repo_id(repo_id)
    about = card or Card()
    with TemporaryDirectory() as scratch:
        if isinstance(bundle, nn.Module):
            folder = save_pretrained(bundle, Path(scratch) / "bundle", **saving)
        else:
            if saving:
                raise ConfigError.of("push_to_hub", [f"{sorted(saving)}: are for a network, and a folder was given"])
            folder = user_path(bundle, "push_to_hub")
        trusted = trust_remote_code or isinstance(bundle, nn.Module)  # or it is the caller's own
        loaded = load_bundle(folder, trust_remote_code=trusted)
        more = page_files(loaded, folder, wanted=about.page)
        return HubFolder(folder, about, more).push(repo_id, private=private, token=token, message=message)


def _forms(model: nn.Module, factory: str | None, known: Input) -> list[Callable[[], _Form]]:
    """The ways to write the network down, the ones that need the least to load it first.

    A network that is not folded may be trained on, and needs its class.
    """
    architecture = _architecture(model, factory)
    alone = replace(architecture, alone=True)
    stands_alone, built = partial(_alone, model, alone), partial(_built, model, architecture, known.spec)
    graph = [partial(_as_graph, model, alone, known)] if _is_folded(model) else []
    if architecture.is_timm:
        return [built, *graph]
    source = getattr(model, "source", None)
    is_trusted = factory is not None or not isinstance(source, ModelSource) or source.is_trusted
    if architecture.backbone is None or not is_trusted:
        return [stands_alone, *graph]
    return [stands_alone, *(graph if isinstance(model, FoldedModel) else []), built]


def _is_folded(model: nn.Module) -> bool:
    """Whether the network is ready to be used: a graph, or frozen."""
    return isinstance(model, FoldedModel) or not any(parameter.requires_grad for parameter in model.parameters())


def _architecture(model: nn.Module, factory: str | None) -> Architecture:
    source, is_graph = getattr(model, "source", None), isinstance(model, FoldedModel)
    if isinstance(model, GraphModule) and not is_graph:
        raise BundleError(
            "a torch.fx graph is code, which no bundle holds; save what fold made of a network of transfer_model, "
            "as fold returned it"
        )
    if not isinstance(source, ModelSource):
        return Architecture(factory, insert_norm=None)
    return Architecture(factory or source.backbone, source.insert_norm, is_graph)


def _alone(model: nn.Module, architecture: Architecture) -> _Form:
    return _Form(architecture, untraced(model, None) if isinstance(model, FoldedModel) else _bare(model))


def _bare(model: nn.Module) -> nn.Module:
    """The network itself, if it kept its head: what is around it is made of what a bundle knows anyway."""
    return model.network if isinstance(model, KeptModel) and model.part is None else model


def _as_graph(model: nn.Module, architecture: Architecture, known: Input) -> _Form:
    graph = as_graph(model, fixed_input(model, known.shape), known.spec)
    parts, steps = plain_steps(graph)
    return _Form(replace(architecture, graph=steps), parts, graph=graph)


def _built(model: nn.Module, architecture: Architecture, spec: InputSpec | None) -> _Form:
    fresh = fresh_network(architecture, spec)
    stored = untraced(model, copy.deepcopy(fresh)) if isinstance(model, FoldedModel) else _bare(model)
    return _Form(architecture, stored, fresh)


def _first_that_fits(forms: Sequence[Callable[[], _Form]], write: Callable[[_Form], Path]) -> Path:
    *others, last = forms
    for form in others:
        try:
            return write(form())
        except (BundleError, LayerError):
            continue
    return write(last())


def _refuse_other(model: nn.Module, stored: nn.Module, known: Input, given: Sequence[Tensor] = ()) -> None:
    """Raises BundleError unless what is stored is the network."""
    if where := difference(model, stored, known.shape, given):
        raise _another(where)


def _another(where: str) -> BundleError:
    return BundleError(
        f"what would be loaded does not output what the network does ({where}), so nothing was saved; its code depends "
        "on what no file holds: build it in a factory='package.module:function'"
    )


def _input(model: nn.Module, given: Sequence[int] | None) -> Input:
    spec = getattr(model, "input_spec", None)
    if not isinstance(spec, InputSpec):
        spec = None
    if given is None and spec is None:
        raise ConfigError.of(
            "save_pretrained",
            [f"input_shape: {type(model).__name__} does not know it; pass that of one input, such as (3, 224, 224)"],
        )
    shape = spec.shape if given is None and spec is not None else tuple(given or ())
    try:
        return Input(shape, spec)
    except ValueError as error:
        raise ConfigError.of("save_pretrained", [f"input_shape: {error}"]) from error


def _checked_classes(classes: Sequence[str] | None, output: Tensor) -> list[str] | None:
    if classes is None:
        return None
    if output.dim() < 2 or len(classes) != output.shape[-1] or not all(isinstance(name, str) for name in classes):
        raise ConfigError.of(
            "save_pretrained",
            [f"classes: {list(classes)[:5]} ... ({len(classes)}) given, {output.shape[-1]} names are needed"],
        )
    return list(told_apart(classes))


def _plans_text(plans: Sequence[Plan]) -> bytes:
    entries = (f'{{"kind": {json.dumps(KINDS[type(plan)])}, "plan": {plan.to_json()}}}' for plan in plans)
    return f"[{', '.join(entries)}]".encode()
