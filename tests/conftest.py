"""What tests of several folders ask for by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("busy machine", deadline=None)  # how long an example takes says nothing
settings.load_profile("busy machine")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One CPU thread, on which sums come out the same, bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
