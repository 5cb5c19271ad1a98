"""The pytest plugin: ``kv_pair``, ``kv_tcp_pair`` and ``kv_faults``.

pytest imports this in every run of an environment that has asynckv, so it imports
nothing, and its fixtures import what they need when a test asks for them. They
are pytest-asyncio's; without it there are none. ``-p no:asynckv.testing.plugin``
leaves it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ("pytest_configure",)


def pytest_configure(config: pytest.Config) -> None:
    """Offer the fixtures, if there is who runs them."""
    manager = config.pluginmanager
    if manager.hasplugin("asyncio") or manager.hasplugin("pytest_asyncio.plugin"):
        manager.import_plugin("asynckv.testing.fixtures")
