"""Images of a user, in whatever form -> batches that a network can be trained on.

`load_data` makes the training, validation and test parts, `make_loader` the batches of one part, and `prepare`
turns a batch of pixels into the network's input, changed at random by `Augment` if asked.

    folders, npz, builtin, wrapped -> datasets     what there is
    shards, hub -> stored                          what there is in files larger than memory
    own_loaders                                    batches that somebody else makes
    opening, looks, decode                         every image once, before anything is trained
    groups, split                                  which images go to which part
    roles, manifest                                the parts written down, and found again
"""

from __future__ import annotations

from basisprune.data.augment import Augment, augment, blend
from basisprune.data.batches import PreparedBatches
from basisprune.data.datasets import ArrayImages, FolderImages, LabelledImages, take
from basisprune.data.listing import image_files
from basisprune.data.load import Splits, load_data
from basisprune.data.loaders import make_loader
from basisprune.data.own_loaders import LoaderPart, Loaders, own_part
from basisprune.data.prepare import prepare
from basisprune.data.reading import Reading
from basisprune.data.split import hold_out
from basisprune.data.wrapped import WrappedDataset

__all__ = [
    "ArrayImages",
    "Augment",
    "FolderImages",
    "LabelledImages",
    "LoaderPart",
    "Loaders",
    "PreparedBatches",
    "Reading",
    "Splits",
    "WrappedDataset",
    "augment",
    "blend",
    "hold_out",
    "image_files",
    "load_data",
    "make_loader",
    "own_part",
    "prepare",
    "take",
]
