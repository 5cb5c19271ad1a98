"""What is to be cancelled: every public coroutine, found by looking for them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any, Final, NamedTuple

import asynckv
import asynckv.connectors
from asynckv import abc as contracts
from asynckv.abc import connectors as contracts_of_connectors
from asynckv.buffers.local.consumer import LocalConsumer
from asynckv.buffers.remote.select import RemoteConsumer

__all__ = ("OF_BUFFERS", "OF_CONNECTORS", "Coroutines")

_ASYNCHRONOUS: Final = (
    *("AbstractAsyncContextManager[", "AsyncIterator["),
    *("Awaitable[", "Coroutine["),
)
_OF_OBJECTS: Final = ("__aenter__", "__aexit__", "__anext__")
# What an engine calls has a sweep of its own. Calls of a tier are never cancelled, and
# a store on tiers has its sweep in tests/stores.
_NOT_THE_CORE: Final = (
    *("asynckv.abc.connectors", "asynckv.abc.tiers", "asynckv.stores."),
    *("asynckv.connectors.", "asynckv.testing.", "asynckv.integrations."),
    "asynckv.cli.",
)
_CONSUMERS: Final[Mapping[str, Sequence[Any]]] = {
    "LookupBuffer.drop_select": (LocalConsumer,),
    "RemoteLookupBuffer.drop_select": (RemoteConsumer,),
}

_Found = tuple[str, tuple[str, ...], Any]


class Coroutines(NamedTuple):
    """Public coroutines: each with its name, what it is covered by, and the function.

    Those of ``one_step`` never wait: they can only be cancelled before they begin.
    """

    find: Callable[[], Iterator[_Found]]
    one_step: frozenset[str]

    def uncovered(self, covers: Iterable[str]) -> list[str]:
        """Name the public coroutines that nothing in ``covers`` is about."""
        known = set(covers)
        if self is OF_CONNECTORS:
            known |= self.one_step
        return [name for name, names, _ in self.find() if known.isdisjoint(names)]

    def codes(self) -> dict[str, CodeType]:
        """Return what runs, and may be suspended, by name.

        Some functions only return what is awaited or entered: of them it is the
        generator or the methods that run behind them.
        """
        found = {}
        for name, names, function in self.find():
            if getattr(function, "__isabstractmethod__", False):
                continue
            inner = inspect.unwrap(function)
            about = names if self is OF_BUFFERS else (name,)
            if self.one_step.isdisjoint(about) and _suspends(inner):
                found[name] = inner.__code__
            for behind in _behind(name, function):
                found[f"{name}: {behind.__qualname__}"] = behind.__code__
        return found


def _of_buffers() -> Iterator[_Found]:
    """Yield those of :mod:`asynckv`, of the contracts, of every class of the core that
    keeps one of them, and of the public classes in the modules of all these."""
    for name in asynckv.__all__:
        function = getattr(asynckv, name)
        if inspect.isfunction(function) and _is_asynchronous(function):
            yield name, (name,), function
    for cls in sorted(_classes(), key=lambda cls: cls.__qualname__):
        for name, function in _public(cls):
            if callable(function) and _is_asynchronous(function):
                names = tuple(f"{base.__name__}.{name}" for base in cls.__mro__)
                yield names[0], names, function


def _of_connectors() -> Iterator[_Found]:
    for module in _modules_of_connectors():
        for name in module.__all__:
            value = getattr(module, name)
            if getattr(value, "__module__", "") != module.__name__:
                continue
            if inspect.iscoroutinefunction(value):
                yield name, (name,), value
            if inspect.isclass(value):
                yield from _methods(value)


def _modules_of_connectors() -> Iterator[ModuleType]:
    yield contracts_of_connectors
    package = asynckv.connectors
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(found.name)


def _methods(cls: type[Any]) -> Iterator[_Found]:
    for name, function in _public(cls):
        if inspect.iscoroutinefunction(function):
            names = {f"{cls.__name__}.{name}"}
            if inspect.isabstract(cls):  # whoever implements it is about it
                found = _implementations(cls, "asynckv.connectors.")
                names |= {f"{sub.__name__}.{name}" for sub in found}
            yield f"{cls.__name__}.{name}", tuple(sorted(names)), function


def _public(cls: type[Any]) -> list[tuple[str, Any]]:
    return [
        (name, function)
        for name, function in vars(cls).items()
        if not name.startswith("_") or name in _OF_OBJECTS
    ]


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
        some = _implementations(contract, "asynckv.")
        found |= {c for c in some if not c.__module__.startswith(_NOT_THE_CORE)}
    # What they inherit of a class that nobody names is public too.
    bases = {base for cls in found for base in cls.__mro__}
    found |= {base for base in bases if base.__module__.startswith("asynckv.buffers.")}
    return {cls for cls in found if not cls.__module__.startswith(_NOT_THE_CORE)}


def _implementations(contract: type[Any], within: str) -> Iterator[type[Any]]:
    for cls in contract.__subclasses__():
        if cls.__module__.startswith(within):
            yield cls
        yield from _implementations(cls, within)


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


OF_BUFFERS: Final = Coroutines(
    _of_buffers,
    frozenset(
        {
            *("KVPipe.__aenter__", "Group.__aenter__"),
            *("LookupBuffer.peek", "LookupBuffer.withdraw", "LookupByRole.withdraw"),
            *("StoreBuffer.clear", "StoreBuffer.contains", "StoreBuffer.delete"),
            *("StoreBuffer.match_prefix", "StoreBuffer.pin", "StoreBuffer.stat"),
            *("InlineTransport.open", "MemTransport.open"),
        }
    ),
)
OF_CONNECTORS: Final = Coroutines(
    _of_connectors,
    frozenset(
        {
            *("KVConnectorWorker.start_load_kv", "MultiWorker.start_load_kv"),
            *("CacheWorker.start_load_kv", "WholeEntry.wait_for", "StoreWorker.start"),
            *("StoreWorker.wait_for_layer_load", "StoreScheduler.start"),
            *("MultiScheduler.start", "WholeEntry.__anext__"),
        }
    ),
)
