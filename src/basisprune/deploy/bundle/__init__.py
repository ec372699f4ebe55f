"""Save and load a network without pickle: its tensors as safetensors, all else as JSON."""

from basisprune.deploy.bundle.saving import Bundle, from_pretrained, load_bundle, push_to_hub, save_pretrained

__all__ = ["Bundle", "from_pretrained", "load_bundle", "push_to_hub", "save_pretrained"]
