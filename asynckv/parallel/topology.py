"""A rank among engines: whom it reads from, and who reads from it."""

from __future__ import annotations

import msgspec

from asynckv.parallel.plans import ReshardPlan, plan_reshard, readers_of
from asynckv.parallel.shapes import EngineShape, Rank, check_same_model

__all__ = ("TransferTopology",)


class TransferTopology:
    """What one rank knows of its engine and of those it exchanges KV with.

    Has every member of vLLM's ``TpKVTopology``, where an engine id may be that of the
    local engine too. Ratios are positive where the local size is the larger one, as
    there: 8 ranks here and 2 there are 4. They are negative the other way round: -4.

    :raises ValueError: the shape has no such rank
    """

    def __init__(self, engine_id: str, shape: EngineShape, rank: Rank = Rank()) -> None:  # noqa: B008
        shape.layers_of(rank.pp)
        self.engine_id = engine_id
        self.shape = shape
        self.rank = rank
        self.heads = shape.heads_of(rank.tp)
        self.tp_rank = rank.tp
        self.tp_size = shape.tp_size
        self.block_size = shape.block_size
        self.is_mla = shape.is_mla
        self.total_num_kv_heads = shape.num_kv_heads
        self.is_kv_layout_blocks_first = shape.layout.is_kv_layout_blocks_first
        self.split_k_and_v = shape.layout.split_k_and_v
        self._shapes = {engine_id: shape}

    @property
    def remote_engines(self) -> tuple[str, ...]:
        """The ids of the engines that are registered."""
        return tuple(self._shapes)[1:]

    def register_remote_engine(self, engine_id: str, shape: EngineShape) -> None:
        """Make an engine known. Nothing happens if it is, with the same shape.

        :raises IncompatiblePeer: it runs another model; ``field`` names what differs
        :raises ValueError: it is known with another shape: unregister it first
        """
        check_same_model(self.shape, shape)
        if self._shapes.setdefault(engine_id, shape) != shape:
            raise ValueError(
                f"engine {engine_id!r} is registered with another shape; "
                "unregister_remote_engine() first"
            )

    def unregister_remote_engine(self, engine_id: str) -> None:
        """Forget an engine. Nothing happens if it is not known.

        :raises ValueError: it is the local one
        """
        if engine_id == self.engine_id:
            raise ValueError(f"{engine_id!r} is the local engine")
        self._shapes.pop(engine_id, None)

    def shape_of(self, engine_id: str) -> EngineShape:
        """Return what an engine's KV is cut into.

        :raises KeyError: it is not registered
        """
        try:
            return self._shapes[engine_id]
        except KeyError:
            raise KeyError(f"engine {engine_id!r} is not registered") from None

    def plan_from(self, engine_id: str) -> ReshardPlan:
        """Return what this rank reads from an engine, and where each byte goes.

        :raises KeyError: it is not registered
        """
        return plan_reshard(self.shape_of(engine_id), self.shape, self.rank)

    def handshake_target_ranks(self, engine_id: str) -> tuple[Rank, ...]:
        """Return the ranks, of all stages, that this one must know to read from them.

        :raises KeyError: it is not registered
        """
        return self.plan_from(engine_id).source_ranks

    def reader_ranks(self, engine_id: str) -> tuple[Rank, ...]:
        """Return the ranks of an engine that read from this one.

        As many ``deliveries`` an entry of this rank takes. There may be none: then
        other ranks hold the same heads, and this one has nothing to hand over. What
        each of them reads :func:`plan_reshard` says.

        :raises KeyError: it is not registered
        """
        return readers_of(self.shape, self.shape_of(engine_id), self.rank)

    @property
    def remote_tp_size(self) -> dict[str, int]:
        """Each engine's number of ranks, the local one's too."""
        return {name: shape.tp_size for name, shape in self._shapes.items()}

    @property
    def remote_block_size(self) -> dict[str, int]:
        """Each engine's block size, the local one's too."""
        return {name: shape.block_size for name, shape in self._shapes.items()}

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Return how many times as many ranks one side has as the other.

        :raises ValueError: neither number divides the other
        """
        return _ratio("tp_size", self.tp_size, remote_tp_size)

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Return how many times as large one side's blocks are as the other's.

        :raises ValueError: neither size divides the other
        """
        return _ratio("block_size", self.block_size, remote_block_size)

    def tp_ratio_from_engine_id(self, engine_id: str) -> int:
        """:meth:`tp_ratio` of an engine. Also raises KeyError if it is not known."""
        return self.tp_ratio(self.shape_of(engine_id).tp_size)

    def block_size_ratio_from_engine_id(self, engine_id: str) -> int:
        """:meth:`block_size_ratio` of an engine. Also raises KeyError."""
        return self.block_size_ratio(self.shape_of(engine_id).block_size)

    def is_kv_replicated(self, engine_id: str) -> bool:
        """Whether an engine has more ranks than there are heads: with as many, not.

        :raises KeyError: it is not registered
        """
        return self.shape_of(engine_id).is_kv_replicated

    def replicates_kv_cache(self, engine_id: str) -> bool:
        """Whether ranks of an engine hold the same: replicated heads, or MLA.

        :raises KeyError: it is not registered
        """
        return self.is_mla or self.is_kv_replicated(engine_id)

    def target_remote_ranks(self, remote_tp_size: int) -> list[int]:
        """Return which of so many ranks of a stage this one reads from.

        :raises ValueError: the heads cannot be divided over as many
        """
        remote = msgspec.structs.replace(
            self.shape, tp_size=remote_tp_size, stages=(self.shape.num_layers,)
        )
        plan = plan_reshard(remote, self.shape, self.rank)
        return [rank.tp for rank in plan.source_ranks]

    def get_target_remote_rank(self, remote_tp_size: int) -> int:
        """Return the one of so many ranks that this one reads from.

        :raises ValueError: there are several: ask :meth:`target_remote_ranks`
        """
        ranks = self.target_remote_ranks(remote_tp_size)
        if len(ranks) > 1:
            raise ValueError(
                f"rank {self.tp_rank} of {self.tp_size} reads from {len(ranks)} of "
                f"{remote_tp_size}: target_remote_ranks() names them"
            )
        return ranks[0]

    def get_target_remote_rank_from_engine_id(self, engine_id: str) -> int:
        """:meth:`get_target_remote_rank` of an engine. Also raises KeyError."""
        return self.get_target_remote_rank(self.shape_of(engine_id).tp_size)

    def describe(self, engine_id: str) -> str:
        """Return one line on an engine, for logs.

        :raises KeyError: it is not registered
        """
        shape = self.shape_of(engine_id)
        return (
            f"{engine_id}: tp {shape.tp_size}, pp {shape.pp_size}, "
            f"{shape.num_layers} layers, {shape.heads_per_rank} of "
            f"{shape.num_kv_heads} heads a rank, blocks of {shape.block_size} tokens, "
            f"{shape.layout.axes}"
        )


def _ratio(name: str, local: int, remote: int) -> int:
    if remote < 1 or (local % remote and remote % local):
        raise ValueError(f"{name} is {local} here and {remote} there: no whole ratio")
    return local // remote if local >= remote else -(remote // local)
