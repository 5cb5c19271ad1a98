"""What is to be cancelled: every public coroutine of connectors, found by looking."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator
from types import CodeType, ModuleType
from typing import Any, Final

import asynckv.connectors
from asynckv.abc import connectors as contracts

__all__ = ("ONE_STEP", "codes_of_coroutines", "public_coroutines", "uncovered")

_OF_OBJECTS: Final = ("__aenter__", "__aexit__")

ONE_STEP: Final = frozenset(
    {
        "KVConnectorWorker.start_load_kv",
        "StoreWorker.start",
        "StoreWorker.wait_for_layer_load",
        "StoreScheduler.start",
        "MultiWorker.start_load_kv",
        "MultiScheduler.start",
        "CacheWorker.start_load_kv",
        "WholeEntry.wait_for",
    }
)
"""Coroutines that never wait: they can only be cancelled before they begin."""


def public_coroutines() -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yield each with its name, the names it is covered by, and the function."""
    for module in _modules():
        for name in module.__all__:
            value = getattr(module, name)
            if getattr(value, "__module__", "") != module.__name__:
                continue
            if inspect.iscoroutinefunction(value):
                yield name, (name,), value
            if inspect.isclass(value):
                yield from _methods(value)


def uncovered(covers: Iterable[str]) -> list[str]:
    """Name the public coroutines that nothing in ``covers`` is about."""
    known = {*covers, *ONE_STEP}
    return [name for name, names, _ in public_coroutines() if known.isdisjoint(names)]


def codes_of_coroutines() -> dict[str, CodeType]:
    """Return what runs, and may be suspended, by name."""
    return {
        name: function.__code__
        for name, _, function in public_coroutines()
        if not getattr(function, "__isabstractmethod__", False)
        if name not in ONE_STEP
    }


def _modules() -> Iterator[ModuleType]:
    yield contracts
    package = asynckv.connectors
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(found.name)


def _methods(cls: type[Any]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    for name, function in vars(cls).items():
        is_public = not name.startswith("_") or name in _OF_OBJECTS
        if is_public and inspect.iscoroutinefunction(function):
            names = {f"{cls.__name__}.{name}"}
            if inspect.isabstract(cls):  # whoever implements it is about it
                names |= {f"{sub.__name__}.{name}" for sub in _subclasses(cls)}
            yield f"{cls.__name__}.{name}", tuple(sorted(names)), function


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for sub in cls.__subclasses__():
        if sub.__module__.startswith("asynckv.connectors."):
            yield sub
            yield from _subclasses(sub)
