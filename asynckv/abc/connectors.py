"""A connector: what an engine calls. Its scheduler decides, its workers move bytes.

The two sides may be in two processes, as in vLLM. What the scheduler side decided
reaches the workers as a :class:`KVConnectorMetadata`, what they finished comes back as
:class:`KVTransferResults`. What not every connector can do is an ability: an ABC of its
own, to be asked for with ``isinstance``.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from asynckv.abc.closing import Closable
from asynckv.abc.steps import (
    BlockIds,
    KVAnswer,
    KVConnectorHandshake,
    KVConnectorMetadata,
    KVConnectorStep,
    KVQuestion,
    KVRequest,
    KVTransferResults,
)

if TYPE_CHECKING:
    import torch

__all__ = (
    "AsksElsewhere",
    "CopyBlocksOp",
    "KVConnectorScheduler",
    "KVConnectorWorker",
    "SupportsCrossLayerCaches",
    "SupportsHMA",
    "SupportsHandshake",
    "SupportsHeldBlocks",
    "SupportsHostCopies",
    "SupportsLayerwise",
    "SupportsStreams",
    "TakesHandshakes",
    "supports_hma",
)

CopyBlocksOp: TypeAlias = Callable[
    [
        "Mapping[str, torch.Tensor]",
        "Mapping[str, torch.Tensor]",
        Sequence[int],
        Sequence[int],
        str,
    ],
    None,
]
"""Copies blocks between host and device: caches from and to, ids from and to, way."""


class KVConnectorScheduler(abc.ABC):
    """The side that decides: one in each engine. Plain functions; none ever waits.

    An answer that has to be asked for elsewhere is "ask again" until it is there.
    Late, repeated and unknown completions are counted and never raised. It belongs to
    the thread that first calls it: in another one that raises ``WrongLoop``, but for
    ``statistics`` and ``shutdown``.
    """

    @classmethod
    def get_required_kvcache_layout(cls) -> str | None:
        """Return the layout a cache must have (``"NHD"``, ``"HND"``), ``None``: any.

        :raises TypeError: asked of the abstract class
        """
        if cls is KVConnectorScheduler:
            raise TypeError(
                "the abstract connector requires no layout: ask the configured class"
            )
        return None

    def on_new_request(self, request: KVRequest) -> None:
        """A request has come in: what it will need may be asked for early."""
        del request

    @abc.abstractmethod
    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens beyond ``num_computed_tokens`` can be loaded.

        And whether that happens between steps, while the request waits: then its
        completion comes as ``finished_recving``. ``None``: not known yet, ask again.
        May be called any number of times, and changes nothing that counts.
        """

    @abc.abstractmethod
    def update_state_after_alloc(
        self, request: KVRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """The engine has allocated the request's blocks, all that it has now.

        ``num_external_tokens`` of them are this connector's to fill; 0 means that it
        has nothing to load, whatever it had offered. May come twice for one load.
        """

    @abc.abstractmethod
    def build_connector_meta(self, step: KVConnectorStep) -> KVConnectorMetadata:
        """Return what the workers do in this step, once. ``step`` is not changed.

        All that ``step`` schedules is computed, and its blocks are left alone, until
        the step's ``wait_for_save`` has returned: also for a request that is finished
        meanwhile. Its save goes on, and whoever loads it could not tell.
        """

    @abc.abstractmethod
    def update_connector_output(self, results: KVTransferResults) -> KVTransferResults:
        """Take what the workers finished; return what the engine may believe of it.

        What it returns names each request at most once a direction, and only such as
        are expected: an engine that falls over anything else is safe with it.
        """

    @abc.abstractmethod
    def request_finished(
        self, request: KVRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, object] | None]:
        """The engine is done with a request, which may say that it ``is_aborted``.

        ``True``: its blocks must stay as they are until ``finished_sending`` or, of a
        load under way, ``finished_recving`` names it. ``False``: they are free, but for
        those of a step under way, which is computed to its end: see
        :meth:`build_connector_meta`. The mapping, if any, is what the request carries
        to the other engine as ``kv_transfer_params``.
        """

    def get_finished_count(self) -> int | None:
        """How many workers report each completion; ``None``: all of them."""
        return None

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping although no request is running."""
        return False

    def reset_cache(self) -> bool | None:
        """Forget what is cached elsewhere; ``None``: there is no such thing."""
        return None

    def statistics(self) -> object:
        """Return a frozen value of counters. Never waits."""
        return None

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Decide nothing more. May be called again."""


class KVConnectorWorker(Closable):
    """The side that moves bytes: one in each rank. It belongs to one event loop.

    Elsewhere it raises ``WrongLoop``, but for ``statistics`` and ``abort``. Caches may
    be registered, and callbacks given, before a loop runs.

    A step is ``bind_connector_metadata``, ``start_load_kv``, the forward with the
    hooks of :class:`SupportsLayerwise`, ``wait_for_save``, ``get_finished`` and
    ``clear_connector_metadata``. A step without a forward is one too.
    ``metadata_type`` is what its scheduler side tells it.
    """

    metadata_type: ClassVar[type[KVConnectorMetadata]]

    @abc.abstractmethod
    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Mapping[str, int] | None = None,
    ) -> None:
        """Take the paged caches, layer by layer, once and before the first step.

        They are read and written where they lie. ``groups`` says which of a request's
        lists of blocks is a layer's; without it there is one list.

        :raises ValueError: they are no caches of the layout that was declared
        """

    @abc.abstractmethod
    async def start(self) -> None:
        """Open what the configuration names; peers may come later.

        A cancelled call leaves nothing open.

        :raises ConfigError: an address that cannot be listened on
        """

    @abc.abstractmethod
    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        """What follows is the step of this ``metadata``. Never waits."""

    @abc.abstractmethod
    def clear_connector_metadata(self) -> None:
        """The step is over. Never waits."""

    @abc.abstractmethod
    async def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        """Issue the loads of this step, and end those of aborted requests.

        Returns when they are issued, whatever a peer does. A cancelled call has
        issued some of them.
        """

    @abc.abstractmethod
    async def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until the layer is there, of every load that this step's forward reads.

        A load that fails ends the wait too: :meth:`get_finished` says so, and which
        blocks. Without such loads it returns at once. A cancelled call leaves no trace.
        """

    @abc.abstractmethod
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor | None = None,
        attn_metadata: object = None,
        **kwargs: object,
    ) -> None:
        """The layer is computed, for this step's prompts. Never waits, never copies.

        ``kv_layer`` is the registered cache of that layer, or nothing.
        """

    @abc.abstractmethod
    async def wait_for_save(self) -> None:
        """Return when the source blocks of this step's saves may be overwritten.

        Layers that no :meth:`save_kv_layer` named are saved now. A save that takes too
        long is given up, and counted; it does not make this fail. A cancelled call
        leaves the saves as they are: wait again.
        """

    @abc.abstractmethod
    def get_finished(
        self, finished_req_ids: frozenset[str] = frozenset()
    ) -> KVTransferResults:
        """Return what has ended since the last call. Never waits.

        ``finished_req_ids``: the requests that the engine is done with. Each id comes
        out once a direction, in this call or in a later one.
        """

    @abc.abstractmethod
    def call_when_finished(self, callback: Callable[[], None]) -> None:
        """Call back, on the loop, whenever :meth:`get_finished` has something new."""

    def handle_preemptions(self, metadata: KVConnectorMetadata) -> None:
        """Blocks of preempted requests will be overwritten when this step runs."""
        del metadata

    @abc.abstractmethod
    def statistics(self) -> object:
        """Return a frozen value of counters and gauges. Never waits."""

    async def shutdown(self) -> None:
        """End what is under way, then close. As :meth:`aclose`; may be called again.

        It is bounded and shielded: a cancelled call has closed all the same.
        """
        await self.aclose()


class SupportsLayerwise(abc.ABC):
    """Loads and saves layer by layer, while the forward runs.

    The hooks must run in every forward: not within one captured graph.
    """

    @property
    @abc.abstractmethod
    def wants_layers(self) -> bool:
        """Whether this configuration makes use of the hooks."""


class SupportsHeldBlocks(abc.ABC):
    """A worker for engines that leave blocks alone until their save has ended.

    There ``wait_for_save`` waits as long as a save reads its blocks, which may be long:
    such an engine does not wait for it.
    """

    @abc.abstractmethod
    def let_go_of_blocks(self, request_ids: Set[str] | None) -> None:
        """Blocks of these requests (``None``: of all) will be overwritten soon.

        Their saves go on without them, or fail within the time that a step may wait;
        ``wait_for_save`` returns then. Never waits.
        """


class SupportsStreams(abc.ABC):
    """A worker for engines with caches on a GPU that work in another thread.

    What is saved is what the engine's current stream had been given to compute, and no
    block is written by a load that it may still read. A worker that is called in the
    engine's own thread sees by itself where that stream is.
    """

    @abc.abstractmethod
    def mark_stream(self) -> object:
        """Mark where the calling thread's current stream of the caches' GPU is.

        In any thread, once caches are registered. Never waits. In host memory there
        is nothing to mark: ``None``.

        :raises GPUFailed: CUDA refused
        """

    @abc.abstractmethod
    def follow(self, mark: object) -> None:
        """What is issued from now on comes after ``mark``, whatever thread issues it.

        Until the next one. Never waits. An error that :meth:`mark_stream` raised may
        be followed too: what is issued then fails by it.
        """


class SupportsHMA(abc.ABC):
    """Takes requests whose layers have several groups of blocks (hybrid models)."""

    @abc.abstractmethod
    def request_finished_all_groups(
        self, request: KVRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, object] | None]:
        """As :meth:`KVConnectorScheduler.request_finished`, for every group."""


class SupportsCrossLayerCaches(abc.ABC):
    """Takes one tensor that holds the caches of all layers, layers first."""

    @abc.abstractmethod
    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, layer_names: Sequence[str]
    ) -> None:
        """Instead of ``register_kv_caches``: ``kv_cache[i]`` is ``layer_names[i]``'s.

        :raises ValueError: there are not as many layers as names
        """


class SupportsHostCopies(abc.ABC):
    """Lets the engine bring its own copying between device and host blocks."""

    @abc.abstractmethod
    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """Use ``copy_operation`` where blocks move between device and host."""


class SupportsHandshake(abc.ABC):
    """A worker that has something to tell its scheduler side, once it is registered."""

    @abc.abstractmethod
    def get_handshake_metadata(self) -> KVConnectorHandshake | None:
        """What the scheduler side must know of this rank; ``None`` before ``start``."""


class TakesHandshakes(abc.ABC):
    """A scheduler side that must know something of each worker."""

    @abc.abstractmethod
    def set_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshake]
    ) -> None:
        """Take what the worker of each rank told. May come again after a restart."""


class AsksElsewhere(Closable):
    """A scheduler side with questions that only a peer can answer.

    Its plain functions belong to the engine's thread, its coroutines to a loop, which
    may be another thread's: questions are taken here, asked there, and their answers
    are handed back here.
    """

    @abc.abstractmethod
    async def start(self) -> None:
        """Open what the configuration names. A cancelled call leaves nothing open."""

    @abc.abstractmethod
    def take_questions(self) -> tuple[KVQuestion, ...]:
        """Return what has to be asked now, each question once. Never waits."""

    @abc.abstractmethod
    async def ask(self, question: KVQuestion) -> KVAnswer:
        """Ask. What goes wrong is an answer too: nothing is there.

        A cancelled call leaves no trace; the question has to be asked again.
        """

    @abc.abstractmethod
    def take_answer(self, answer: KVAnswer) -> None:
        """From now on this is known. Never waits; one that comes late is dropped."""


def supports_hma(connector: object) -> bool:
    """Whether a connector, or a class of connectors, takes several groups of blocks."""
    kind = connector if isinstance(connector, type) else type(connector)
    return issubclass(kind, SupportsHMA)
