"""Laws of Ray as a place for cells that need no cluster; tests/pipeline/test_sweep.py has one."""

from __future__ import annotations

import sys

import pytest

from basisprune.errors import ConfigError, MissingExtraError
from basisprune.sweeps.ray_pool import OnRay, require_ray
from basisprune.sweeps.running import Running


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"basisprune\[ray\]"):
        require_ray()


def test_an_address_without_a_cluster_is_refused(monkeypatch):
    ray = pytest.importorskip("ray")

    def nobody(**_options):
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", nobody)
    with pytest.raises(ConfigError, match="ray_address: 'auto' given; no Ray cluster answers there"):
        OnRay(Running(ray_address="auto"))
