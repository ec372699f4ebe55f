"""A user's images, in any form -> batches that a network can be trained on.

load                    whatever a user has -> training, validation and test parts
folders, hub            class folders and tar shards, datasets of Hugging Face and torchvision by name
arrays, datasets        arrays and labels checked; images in memory, in files, in PyTorch datasets
decode                  image files -> pixels, and what opening one shows
copies, split           near copies; which images go to which part
manifest                the parts written down, and found again
transforms, loaders     pixels -> what a network reads; batches, ours and the user's own
"""

from __future__ import annotations

from basisprune.data.datasets import ArrayImages, LabelledImages, WrappedDataset, is_prepared, take
from basisprune.data.folders import FolderImages, image_files
from basisprune.data.load import Reading, load_data
from basisprune.data.loaders import LoaderPart, Loaders, PreparedBatches, make_loader, own_part
from basisprune.data.split import Splits, hold_out
from basisprune.data.transforms import Augment, augment, blend, prepare

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
    "is_prepared",
    "load_data",
    "make_loader",
    "own_part",
    "prepare",
    "take",
]
