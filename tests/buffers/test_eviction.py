"""The least recently used goes first."""

from __future__ import annotations

from hypothesis import given, strategies as st

from asynckv.buffers.eviction import EvictionOrder


def order_of(*keys: str) -> EvictionOrder[str]:
    order: EvictionOrder[str] = EvictionOrder()
    for key in keys:
        order.add(key, len(key))
    return order


def test_the_spared_key_is_the_last_victim() -> None:
    order = order_of("a", "bb")
    assert order.victim(spare="a") == "bb"
    order.discard("bb")
    assert order.victim(spare="a") == "a"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 9))))
def test_it_orders_as_a_list_does(steps: list[tuple[bool, int, int]]) -> None:
    order: EvictionOrder[int] = EvictionOrder()
    model: list[tuple[int, int]] = []
    for adds, key, nbytes in steps:
        model = [item for item in model if item[0] != key]
        if adds:
            model.append((key, nbytes))
            order.add(key, nbytes)
        else:
            order.discard(key)
        assert list(order) == [item[0] for item in model]
        assert order.nbytes == sum(item[1] for item in model)
        assert order.victim() == (model[0][0] if model else None)
