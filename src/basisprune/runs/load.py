"""A run that is ready to start: the network, the images and all settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue
from torch import nn

from basisprune.budget.metrics import in_words
from basisprune.budget.planning import CostPlanner
from basisprune.budget.shares import Shares, shares
from basisprune.callback import Callback, NullCallback
from basisprune.data import LoaderPart, Loaders, Splits, load_data
from basisprune.data.decode import random_numbers_kept
from basisprune.data.load import PREFIXES, Reading, Source, fetch, load_divided, with_unlabelled
from basisprune.data.manifest import IMAGES, UNLABELLED, Manifest, read_manifest
from basisprune.data.split import groups_of, hold_out_confirmation, units
from basisprune.deploy.bundle import holds_bundle
from basisprune.deploy.timing import table_digest
from basisprune.errors import CheckpointError, ConfigError, DataError
from basisprune.files import user_path
from basisprune.method.pipeline import Pipeline
from basisprune.method.states import StageStore
from basisprune.recipes import for_own_inputs
from basisprune.results import Settings
from basisprune.runs.folder import (
    CONFIG,
    DEVICE_DIGEST,
    IN_PYTHON,
    PREPARED,
    changed_settings,
    refuse_links,
    same_data,
    settings_of,
)
from basisprune.runs.network import (
    is_folder_of_a_model,
    kept_network,
    known_network,
    new_network,
    opened,
    whole_network,
    with_own_weights,
)
from basisprune.runs.settings import BUDGETS, RATIOS, RunConfig, names_in
from basisprune.torchkit.imports import Code, Role, called, is_factory, is_reference, named_object, refuse_code
from basisprune.torchkit.processes import Processes
from basisprune.transfer.backbones import is_known_name
from basisprune.transfer.model import TransferModel

AnyModel = str | os.PathLike[str] | nn.Module


@dataclass(frozen=True)
class Job:
    """The input of a run; `model` and `data` are names in the settings, `labels` are for images without them."""

    network: nn.Module
    splits: Splits
    config: RunConfig
    model: str
    data: str
    labels: Path | None = None

    def to_dict(self) -> dict[str, JsonValue]:
        """All settings as JSON values, as in config.yaml, and which content the file of the device has."""
        device = self.config.device
        content: dict[str, JsonValue] = (
            {} if device is None else {DEVICE_DIGEST: table_digest(user_path(device, "device"))}
        )
        if self.splits.train.prepared:
            content[PREPARED] = True
        return {"model": self.model, "data": self.data, **self.config.to_dict(), **content}

    def pipeline(self, stages: Path | None, callback: Callback, *, planned: bool = True) -> Pipeline:
        """Set up the pipeline, which keeps what it makes in `stages`; unless it is `planned`, no times are measured."""
        config, planner = self.config, None
        if planned:
            device = None if config.device is None else user_path(config.device, "device")
            keep = StageStore(stages, callback.log).times
            planner = CostPlanner.of(config.optimize, device, self.network, callback.log, keep)
        return Pipeline(
            self.network,
            self.splits,
            config.recipe,
            checkpoints=stages,
            callback=callback,
            planner=planner,
            trained=config.is_trained,
            task=config.task,
        )


def prepare_job(
    model: AnyModel,
    data: Source | Loaders,
    config: RunConfig,
    *,
    output: Path | None = None,
    callback: Callback | None = None,
) -> Job:
    """Prepare the network to start from, and the images at its input size, all of which were opened.

    A run in the folder `output` uses exactly the images that it has chosen before, and so does one that starts
    from the model of a run on the same data: what a network was trained on does not judge it, and what has judged it
    does not confirm. Raises ConfigError for a size that is not the model's, and DataError for unusable images.
    """
    refuse_code(code_of(model, data, None))
    processes = Processes.joined()
    if not processes.is_main:
        callback = NullCallback()
    if processes.count > 1 and isinstance(data, str):
        name = data
        processes.on_main(lambda: fetch(name))  # so that they do not all download it at once
    torch.manual_seed(config.seed)
    folder = None if output is None else user_path(output, "output")
    names = _called(model), _called(data)
    loaders = loaders_of(data)
    if loaders is not None:
        return own_job(model, loaders, config, names, callback)
    chosen = None if folder is None else _chosen_before(folder, {"data": names[1], **config.to_dict()})
    of_model = _manifest_of_model(model, names[1])
    manifest = chosen or of_model
    if of_model is not None:
        (callback or NullCallback()).log("the images have the roles that they had when the model was trained")
    reading = Reading(groups=config.groups, strict=config.strict, manifest=manifest, callback=callback)
    earlier = folder / UNLABELLED if folder is not None and chosen is not None else None
    unlabelled = read_manifest(earlier) if earlier is not None and earlier.exists() else None
    read = partial(
        load_images,
        cast("Source", data),
        config=config,
        reading=reading,
        divides=of_model is None,
        unlabelled=unlabelled,
    )
    model = opened(model, config)
    if config.keep_head:
        network, splits = kept_network(model, read, config, callback or NullCallback())
    elif isinstance(model, nn.Module) and hasattr(model, "input_spec"):
        network, splits = known_network(with_own_weights(model, config, callback or NullCallback()), read, config)
    else:
        network, splits = new_network(model, read, config)
    return Job(network, splits, config, *names)


def loaders_of(data: object) -> Loaders | None:
    """The loaders that were given, or that 'package.module:loaders' refers to; None for other data."""
    if isinstance(data, Loaders):
        return data
    if not isinstance(data, str) or not _is_of_loaders(data):
        return None
    found = called(data, named_object(data, "loaders", DataError), DataError)
    if not isinstance(found, Loaders):
        raise DataError(f"{data!r} is a {type(found).__name__}; Loaders, or a function that returns them, are needed")
    return found


def _is_of_loaders(data: object) -> bool:
    """Whether the name of data refers to code, and is neither a path nor a kind of data that has a prefix."""
    return is_reference(data) and not str(data).startswith(PREFIXES) and not Path(str(data)).exists()


def code_of(model: object, data: object, task: object) -> tuple[Code, ...]:
    """The references to code among the names of a model, of data and of a task."""
    found: tuple[tuple[Role, object, bool], ...] = (
        ("factory", model, _names_code(model)),
        ("loaders", data, _is_of_loaders(data)),
        ("task", task, is_reference(task)),
    )
    return tuple((role, str(name)) for role, name, is_code in found if is_code)


def own_job(
    model: AnyModel, loaders: Loaders, config: RunConfig, names: tuple[str, str], callback: Callback | None = None
) -> Job:
    """The job of a network of the user's own, which stays whole, on loaders of their own."""
    config = replace(config, recipe=for_own_inputs(config.recipe))
    if loaders.val is None:
        raise DataError("Loaders: val is missing, which networks are judged on; pass val=...")
    _refuse_changes(config)
    splits = loaders.splits(config.task, Reading(strict=config.strict, callback=callback))
    shape = cast("LoaderPart", splits.train).shape
    with random_numbers_kept():
        given = config.task.read(next(iter(loaders.train)))[0]
    network = whole_network(model, shape, config, callback or NullCallback(), given)
    return Job(network, splits, config, *names)


def _refuse_changes(config: RunConfig) -> None:
    """Raises ConfigError for settings of images that are read here, of which loaders of one's own know nothing."""
    faults = [
        f"{name}: {value!r} given with loaders of your own, whose inputs are taken as they are; omit it"
        for name in ("size", "limit", "groups", "mean", "std", "interpolation")
        if (value := getattr(config, name)) is not None
    ]
    if faults:
        raise ConfigError.of("compress", faults)


def _names_code(model: object) -> bool:
    """Whether a model is given as a function that builds it; a folder may have a name that looks like one."""
    return is_factory(model) and not is_known_name(model) and not is_folder_of_a_model(Path(str(model)))


def _manifest_of_model(model: AnyModel, data: str) -> Manifest | None:
    """Return the images of the run that trained the model, if that was on the same data."""
    if not isinstance(model, str | os.PathLike) or not holds_bundle(Path(model)):
        return None
    run = Path(model).resolve().parent
    is_run = (run / IMAGES).exists() and (run / CONFIG).exists()
    return read_manifest(run / IMAGES) if is_run and same_data(data, settings_of(run).get("data")) else None


def _chosen_before(output: Path, settings: Settings) -> Manifest | None:
    """Return the images of the run in the folder; None if it chooses them otherwise, and is refused later."""
    if not (output / IMAGES).exists() or not (output / CONFIG).exists():
        return None
    refuse_links(output)
    try:
        old = settings_of(output)
    except CheckpointError:
        return read_manifest(output / IMAGES)
    decides = {"data", "seed", *names_in("Data")}
    if not old.keys().isdisjoint((*BUDGETS, *RATIOS)):  # by which shares are chosen; a training notes none
        decides.update(names_in("Budget"))
    is_same = changed_settings(old, settings).keys().isdisjoint(decides)
    return read_manifest(output / IMAGES) if is_same else None


def factory_of(job: Job) -> str | None:
    """The function that builds a network which is not from `transfer_model`, if the job knows it by name."""
    return job.model if _names_code(job.model) and not isinstance(job.network, TransferModel) else None


def load_images(
    data: Source,
    size: tuple[int, int] | None,
    config: RunConfig,
    reading: Reading,
    *,
    divides: bool = True,
    unlabelled: Manifest | None = None,
) -> Splits:
    """Load the images at that size, divided as the settings say, or else by their number and the budget.

    Without `divides`, validation images stay undivided. `unlabelled` lists images without labels chosen before.
    """
    callback, fixed = reading.callback or NullCallback(), config.fractions
    with random_numbers_kept():  # what a dataset draws must not decide on a new classifier
        if fixed is None:
            choose = partial(_chosen_fractions, config=config, draws=not isinstance(data, Splits), callback=callback)
            splits = load_divided(data, choose, size=size, limit=config.limit, seed=config.seed, reading=reading)
        else:
            val, test, confirm = fixed
            splits = load_data(
                data,
                size=size,
                val_fraction=val,
                test_fraction=test,
                confirm_fraction=confirm if config.guarantee is not None and config.unlabelled is None else 0.0,
                limit=config.limit,
                seed=config.seed,
                reading=reading,
            )
    if config.unlabelled is not None:
        with random_numbers_kept():
            return with_unlabelled(splits, config.unlabelled, size, reading, unlabelled)
    is_divided = splits.val is None or splits.confirm is not None
    if config.guarantee is None or fixed is None or is_divided or not divides:
        return splits
    # The images of an earlier run, which had none to confirm.
    return hold_out_confirmation(splits, fixed[2], config.seed, units(splits, "val", groups_of(splits, config.groups)))


def _chosen_fractions(
    splits: Splits, groups: Mapping[str, str], *, config: RunConfig, draws: bool, callback: Callback
) -> tuple[float, float, float]:
    """Choose how images are divided, by their number and the budget; what is not drawn stays in the part it is in."""
    if splits.confirm is not None or (splits.val is None and not draws):
        return 0.0, 0.0, 0.0
    count = {part: len(np.unique(units(splits, part, groups))) for part in splits.parts.keys() & {"train", "val"}}
    guarantee = config.guarantee
    choose = partial(
        shares,
        count["train"],
        unlabelled=config.unlabelled is not None,
        validation=count.get("val"),
        has_test=splits.test is not None or not draws,
    )
    found = choose(guarantee)
    if guarantee is not None and found.confirm and not guarantee.reachable(_expected_labels(splits, found)):
        callback.log(f"too few images of some class to certify {in_words(guarantee.metric)}; none are set aside for it")
        found = choose(None)
    callback.log(found.sentence)
    return found.fractions


def _expected_labels(splits: Splits, found: Shares) -> NDArray[np.int64]:
    drawn_from = splits.train if splits.val is None else splits.val
    share = found.confirm / (found.images if found.validation is None else found.validation)
    labels, counts = np.unique(drawn_from.labels, return_counts=True)
    return np.repeat(labels, np.maximum(np.rint(share * counts).astype(np.int64), 1))


def _called(given: object) -> str:
    return str(given) if isinstance(given, str | os.PathLike) else f"a {type(given).__name__}{IN_PYTHON}"
