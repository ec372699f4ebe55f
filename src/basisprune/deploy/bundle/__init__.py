"""Save and load a network without pickle: its tensors as safetensors, all else as JSON."""

from basisprune.deploy.bundle.hub import Card
from basisprune.deploy.bundle.loading import Bundle, check_folder, from_pretrained, holds_bundle, load_bundle
from basisprune.deploy.bundle.saving import push_to_hub, refuse_unsaveable, save_pretrained

__all__ = [
    "Bundle",
    "Card",
    "check_folder",
    "from_pretrained",
    "holds_bundle",
    "load_bundle",
    "push_to_hub",
    "refuse_unsaveable",
    "save_pretrained",
]
