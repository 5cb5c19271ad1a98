from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

from asynckv import abc

CLASSES = [
    value
    for name in abc.__all__
    if inspect.isclass(value := getattr(abc, name)) and inspect.isabstract(value)
]


@pytest.mark.parametrize("page", CLASSES)
def test_every_public_method_of_the_pages_has_its_contract(page: type) -> None:
    for name, member in vars(page).items():
        if callable(member) and not name.startswith("_"):
            assert inspect.getdoc(member), f"{page.__name__}.{name}"


def test_every_coroutine_of_users_says_what_its_cancellation_leaves_behind() -> None:
    for page in set(CLASSES) - {abc.PayloadTransport, abc.StoreTier}:
        for name, member in vars(page).items():
            if inspect.iscoroutinefunction(member) and not name.startswith("_"):
                assert "cancel" in str(inspect.getdoc(member)), f"{page}.{name}"


def test_every_name_of_a_page_is_in_the_index() -> None:
    pages = [
        importlib.import_module(f"asynckv.abc.{page.name}")
        for page in pkgutil.iter_modules(abc.__path__)
        if page.name != "closing"
    ]
    assert {name for page in pages for name in page.__all__} == set(abc.__all__)
