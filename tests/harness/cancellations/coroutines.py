"""What is to be cancelled: every public coroutine, found by looking for them."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, Final

import asynckv
from asynckv import abc as contracts
from asynckv.buffers.local.consumer import LocalConsumer
from asynckv.buffers.remote.select import RemoteConsumer

__all__ = ("ONE_STEP", "codes_of_coroutines", "public_coroutines", "uncovered")

_ASYNCHRONOUS: Final = (
    "AbstractAsyncContextManager[",
    "AsyncIterator[",
    "Awaitable[",
    "Coroutine[",
)
_OF_OBJECTS: Final = ("__aenter__", "__aexit__", "__anext__")
# What an engine calls has a sweep of its own: harness.cancellations.connectors. Calls
# of a tier are never cancelled, and a store on tiers has its sweep in tests/stores.
_NOT_THE_CORE: Final = (
    "asynckv.abc.connectors",
    "asynckv.abc.tiers",
    "asynckv.stores.",
    "asynckv.connectors.",
    "asynckv.testing.",
    "asynckv.integrations.",
    "asynckv.cli.",
)

ONE_STEP: Final = frozenset(
    {
        "KVPipe.__aenter__",
        "Group.__aenter__",
        "LookupBuffer.peek",
        "LookupBuffer.withdraw",
        "LookupByRole.withdraw",
        "StoreBuffer.clear",
        "StoreBuffer.contains",
        "StoreBuffer.delete",
        "StoreBuffer.match_prefix",
        "StoreBuffer.pin",
        "StoreBuffer.stat",
        "InlineTransport.open",
        "MemTransport.open",
    }
)
"""Coroutines that never wait: they can only be cancelled before they begin."""

_CONSUMERS: Final[Mapping[str, Sequence[Any]]] = {
    "LookupBuffer.drop_select": (LocalConsumer,),
    "RemoteLookupBuffer.drop_select": (RemoteConsumer,),
}


def public_coroutines() -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yield each with its name, the names it is covered by, and the function.

    Those of :mod:`asynckv`, of the contracts, of every class of the core that
    keeps one of them, and of the public classes in the modules of all these.
    """
    for name in asynckv.__all__:
        function = getattr(asynckv, name)
        if inspect.isfunction(function) and _is_asynchronous(function):
            yield name, (name,), function
    for cls in sorted(_classes(), key=lambda cls: cls.__qualname__):
        for name, function in vars(cls).items():
            is_public = not name.startswith("_") or name in _OF_OBJECTS
            if is_public and callable(function) and _is_asynchronous(function):
                names = tuple(f"{base.__name__}.{name}" for base in cls.__mro__)
                yield names[0], names, function


def uncovered(covers: Iterable[str]) -> list[str]:
    """Name the public coroutines that nothing in ``covers`` is about."""
    known = set(covers)
    return [name for name, names, _ in public_coroutines() if known.isdisjoint(names)]


def codes_of_coroutines() -> dict[str, CodeType]:
    """Return what runs, and may be suspended, by name.

    Some functions only return what is awaited or entered: of them it is the
    generator or the methods that run behind them.
    """
    found = {}
    for name, names, function in public_coroutines():
        if getattr(function, "__isabstractmethod__", False):
            continue
        inner = inspect.unwrap(function)
        if ONE_STEP.isdisjoint(names) and _suspends(inner):
            found[name] = inner.__code__
        for behind in _behind(name, function):
            found[f"{name}: {behind.__qualname__}"] = behind.__code__
    return found


def _behind(name: str, function: Any) -> Iterator[Any]:
    """Yield what runs when that is awaited or entered which ``function`` returns."""
    for consumer in _CONSUMERS.get(name, ()):
        yield from map(inspect.unwrap, (consumer.take, consumer.borrow))
    if _suspends(inspect.unwrap(function)):
        return
    for named in function.__code__.co_names:
        called = function.__globals__.get(named)
        if hasattr(called, "__wrapped__"):
            yield inspect.unwrap(called)


def _classes() -> set[type[Any]]:
    homes = {importlib.import_module(asynckv._HOME[name]) for name in asynckv.__all__}
    found = {
        value
        for module in (contracts, *homes)
        for value in (getattr(module, name) for name in module.__all__)
        if inspect.isclass(value)
    }
    for contract in [cls for cls in found if inspect.isabstract(cls)]:
        found |= set(_implementations(contract))
    # What they inherit of a class that nobody names is public too.
    bases = {base for cls in found for base in cls.__mro__}
    found |= {base for base in bases if base.__module__.startswith("asynckv.buffers.")}
    return {cls for cls in found if not cls.__module__.startswith(_NOT_THE_CORE)}


def _implementations(contract: type[Any]) -> Iterator[type[Any]]:
    for cls in contract.__subclasses__():
        if cls.__module__.startswith("asynckv.") and not cls.__module__.startswith(
            _NOT_THE_CORE
        ):
            yield cls
        yield from _implementations(cls)


def _suspends(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _is_asynchronous(function: Any) -> bool:
    """Whether it, or what it returns, is awaited, entered or iterated."""
    if _suspends(inspect.unwrap(function)):
        return True
    returned = getattr(function, "__annotations__", {}).get("return", "")
    if returned.startswith(_ASYNCHRONOUS):
        return True
    cls = vars(sys.modules[function.__module__]).get(returned)
    is_method = "." in function.__qualname__  # one that returns what is there
    return hasattr(cls, "__await__") or (hasattr(cls, "__aenter__") and not is_method)
