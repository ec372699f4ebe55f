"""A network to a folder or the hub, loaded and compared before it is there."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import JsonValue
from safetensors.torch import save
from torch import Tensor, nn
from torch.fx import GraphModule

from basisprune.data.arrays import distinct_names
from basisprune.deploy.bundle.config import KINDS, Architecture, Config, Input, Plan
from basisprune.deploy.bundle.hub import Card, model_card, page_files, push_folder
from basisprune.deploy.bundle.loading import (
    CARD,
    HUB_ID,
    PLANS,
    TENSORS,
    assemble,
    check_folder,
    fingerprint,
    fresh_network,
    load_bundle,
    package_versions,
    read_folder,
    write_folder,
)
from basisprune.deploy.bundle.steps import as_graph, plain_steps
from basisprune.deploy.bundle.structure import collect_tensors, describe
from basisprune.deploy.comparing import alike, difference, fixed_input, run
from basisprune.deploy.graphs import FoldedModel, from_graph
from basisprune.errors import BundleError, ConfigError, LayerError, ModelError
from basisprune.files import user_path
from basisprune.torchkit.running import odd_kinds
from basisprune.transfer.backbones import own_factory
from basisprune.transfer.model import KeptModel, ModelSource
from basisprune.types import InputSpec


@dataclass(frozen=True)
class _Form:
    """One way to write a network down: how it is rebuilt, as what, and what is built first.

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
    """Save the network as it is (dense, decomposed, pruned or folded) and return the folder.

    What was written is loaded and compared with the network, bit for bit, in eval and in training mode, before it takes
    the place of an older bundle in the folder; other files there stay. The network is not changed.

    A network from `transfer_model` is rebuilt from its timm name or `"package.module:factory"`; one of nothing but
    listed layers, or folded and traceable, needs neither. Where a network that knows its function can be written down
    without it, it is, so that no trust is needed.

    Args:
        model: The network.
        folder: A folder that is new, empty or a bundle.
        classes: The names of its classes; by default those that it has as an attribute.
        metrics: Anything that JSON can hold.
        plans: The plans that it was pruned by.
        factory: For other networks, the timm name or function that builds the backbone (or the whole network, if it is
            not from `transfer_model`).
        input_shape: That of one input, for networks without an `input_spec`.
        check_inputs: Batches to compare on, best real ones, besides random ones of several sizes.

    Raises:
        BundleError, LayerError: The network cannot be saved; the folder is as it was.
        ConfigError: An argument is wrong.
    """
    if kinds := odd_kinds(model):
        raise ConfigError.of("save_pretrained", [f"model: {kind} given; pass the plain network" for kind in kinds])
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
        entries = (f'{{"kind": {json.dumps(KINDS[type(plan)])}, "plan": {plan.to_json()}}}' for plan in plans)
        texts = {PLANS: f"[{', '.join(entries)}]".encode(), CARD: model_card(config).encode()}
        files = {TENSORS: save(tensors, {"format": "pt"}), **texts}
        return write_folder(path, config, files, compare)

    def compare(new: Path) -> None:
        loaded = assemble(read_folder(new), str(path), trust_remote_code=True).model  # it is the caller's own
        _refuse_other(model, loaded, known, check_inputs)

    return _first_that_fits(model, factory, known, write)


def refuse_unsaveable(model: nn.Module, factory: str | None = None) -> None:
    """Raise BundleError or LayerError for a network that `save_pretrained` could not write down; write nothing."""
    known = _input(model, None)

    def try_out(form: _Form) -> Path:
        describe(form.stored, form.fresh)
        if form.graph is not None:
            _refuse_other(model, form.graph, known)
        return Path()

    _first_that_fits(model, factory, known, try_out)


def push_to_hub(
    bundle: str | Path | nn.Module,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload a basisprune bundle",
    trust_remote_code: bool = False,
    card: Card | None = None,
    **saving: Any,
) -> str:
    """Push a bundle to the Hugging Face hub and return the address of the commit.

    Where the network can be written as ONNX, `app.py`, `requirements.txt` and `model.onnx` go with it: a page for the
    browser that classifies photos.

    Args:
        bundle: A folder that `save_pretrained` wrote, which is loaded once to be sure that others can; or a network.
        repo_id: `"owner/name"`.
        private: Whether a new repository is private.
        token: An access token of the hub; by default the one that was logged in with.
        message: The message of the commit.
        trust_remote_code: Whether a function that the folder names may be imported and called.
        card: What only you know: the licence of the weights and the datasets.
        saving: The arguments of `save_pretrained`, for a network.
    """
    if not HUB_ID.fullmatch(repo_id):
        raise ConfigError.of("push_to_hub", [f"repo_id: {repo_id!r} given; write 'owner/name'"])
    about = card or Card()
    with TemporaryDirectory() as scratch:
        if isinstance(bundle, nn.Module):
            folder = save_pretrained(bundle, Path(scratch) / "bundle", **saving)
        elif saving:
            raise ConfigError.of("push_to_hub", [f"{sorted(saving)}: are for a network, and a folder was given"])
        else:
            folder = user_path(bundle, "push_to_hub")
        trusted = trust_remote_code or isinstance(bundle, nn.Module)  # or it is the caller's own
        more = page_files(load_bundle(folder, trust_remote_code=trusted), folder, wanted=about.page)
        return push_folder(folder, about, more, repo_id, private=private, token=token, message=message)


def _forms(model: nn.Module, factory: str | None, known: Input) -> list[Callable[[], _Form]]:
    """The ways to write the network down, the ones that need the least to load it first."""
    is_graph, source = isinstance(model, FoldedModel), getattr(model, "source", None)
    if isinstance(model, GraphModule) and not is_graph:
        raise BundleError(
            "a torch.fx graph is code, which no bundle holds; save what fold made of a network of transfer_model, "
            "as fold returned it"
        )
    architecture = Architecture(factory, insert_norm=None)
    if isinstance(source, ModelSource):
        architecture = Architecture(factory or source.backbone, source.insert_norm, is_graph)
    alone = replace(architecture, alone=True)
    is_frozen = not any(parameter.requires_grad for parameter in model.parameters())

    def stands_alone() -> _Form:
        return _Form(alone, from_graph(model, None) if isinstance(model, FoldedModel) else _bare(model))

    def as_steps() -> _Form:
        graph = as_graph(model, fixed_input(model, known.shape), known.spec)
        parts, steps = plain_steps(graph)
        return _Form(replace(alone, graph=steps), parts, graph=graph)

    def built() -> _Form:
        fresh = fresh_network(architecture, known.spec)
        stored = from_graph(model, copy.deepcopy(fresh)) if isinstance(model, FoldedModel) else _bare(model)
        return _Form(architecture, stored, fresh)

    graph = [as_steps] if is_graph or is_frozen else []  # a network that is not folded may be trained on
    if architecture.is_timm:
        return [built, *graph]
    is_trusted = factory is not None or not isinstance(source, ModelSource) or source.is_trusted
    if architecture.backbone is None or not is_trusted:
        return [stands_alone, *graph]
    return [stands_alone, *(graph if is_graph else []), built]


def _bare(model: nn.Module) -> nn.Module:
    """The network itself, if it kept its head: what is around it is made of what a bundle knows anyway."""
    return model.network if isinstance(model, KeptModel) and model.part is None else model


def _first_that_fits(model: nn.Module, factory: str | None, known: Input, write: Callable[[_Form], Path]) -> Path:
    """Write the first form that can be; where none can, one built as the network itself tells, by its class."""
    *others, last = _forms(model, factory, known)
    for form in others:
        try:
            return write(form())
        except (BundleError, LayerError):
            continue
    try:
        return write(last())
    except (BundleError, LayerError):
        own = None if factory is not None or hasattr(model, "source") else own_factory(model)
        for form in _forms(model, own, known) if own is not None else []:
            with suppress(BundleError, LayerError, ModelError):
                return write(form())
        raise


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
    return list(distinct_names(classes))
