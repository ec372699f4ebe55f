"""Make a pretrained CNN small for your own images."""
from basisprune.transfer import *
from basisprune.transfer import TransferModel, transfer_model
