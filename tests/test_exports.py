from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pydoc
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import asynckv
from asynckv.pipes.group import Group
from asynckv.pipes.pipe import Pipe

PACKAGE = Path(__file__).parents[1] / "asynckv"
HARNESS = Path(__file__).parent / "harness"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *HARNESS.rglob("*.py")])
HEAVY = ("torch", "numpy", "cupy", "transformers", "fastapi", "uvloop", "vllm", "rich")


def defined_in(body: list[ast.stmt]) -> Iterator[str]:
    """Public names that a module makes itself."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not makes_a_variable(
            node
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (t.id for t in targets if isinstance(t, ast.Name))


def scenarios_in(body: list[ast.stmt]) -> Iterator[str]:
    """Functions that are registered: nobody has to call them by name."""
    for node in body:
        if isinstance(node, ast.AsyncFunctionDef):
            calls = [one for one in node.decorator_list if isinstance(one, ast.Call)]
            if any(ast.unparse(call.func) == "scenario" for call in calls):
                yield node.name


def makes_a_variable(node: ast.Assign | ast.AnnAssign) -> bool:
    """Whether it is ``T = TypeVar("T")``."""
    called = ast.unparse(getattr(node.value, "func", node))
    return called in {"TypeVar", "ParamSpec"}


def imported_in(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a package takes from its own modules, those it defers included."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from imported_in(node.body)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("asynckv", "harness")
        ):
            yield from (alias.asname or alias.name for alias in node.names)


def public_names(path: Path, body: list[ast.stmt]) -> set[str]:
    names = set(defined_in(body))
    if path.name == "__init__.py":
        names |= set(imported_in(body))
    return {name for name in names if not name.startswith("_")} - {"logger"}


def type_checkers_names() -> dict[str, str]:
    """Name to module, as the imports for type checkers in ``asynckv`` say."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {
        str(alias.asname): str(node.module) for node in imports for alias in node.names
    }


def faults_of_all(path: Path) -> Iterator[str]:
    """What is wrong with ``__all__`` of a file."""
    body = ast.parse(path.read_text()).body
    values = [
        node.value
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        if "__all__" in defined_in([node])
    ]
    if len(values) != 1 or not isinstance(values[0], ast.Tuple):
        yield f"{path}: not one tuple __all__"
        return
    exported = ast.literal_eval(values[0])
    wrong = set(exported) ^ public_names(path, body)
    if wrong := wrong.difference(scenarios_in(body)):
        yield f"{path}: exported or public, and not both: {sorted(wrong)}"
    if len(exported) != len(set(exported)):
        yield f"{path}: a name twice"


def test_all_is_exact() -> None:
    with_all = [path for path in SOURCES if path.name != "__main__.py"]
    with_all.remove(PACKAGE / "__init__.py")
    faults = [fault for path in with_all for fault in faults_of_all(path)]
    assert not faults, "\n".join(faults)


def test_every_name_of_the_package_is_in_the_module_that_the_table_names() -> None:
    for name in asynckv.__all__:
        module = importlib.import_module(asynckv._HOME[name])
        assert getattr(asynckv, name) is getattr(module, name)
        assert name in module.__all__


def test_the_table_agrees_with_the_imports_for_type_checkers() -> None:
    assert asynckv._HOME == type_checkers_names()


def test_the_names_of_the_package_are_sorted() -> None:
    assert list(asynckv.__all__) == sorted(asynckv.__all__)


def test_the_package_lists_its_names_and_has_no_other() -> None:
    assert set(asynckv.__all__) <= set(dir(asynckv))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = asynckv.no_such_name  # type: ignore[attr-defined]


def test_every_name_of_testing_is_there_when_it_is_asked_for() -> None:
    module = importlib.import_module("asynckv.testing")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert not hasattr(module, "no_such_name")


def test_import_asynckv_is_light() -> None:
    code = f"import sys, asynckv; print(*sorted(set(sys.modules) & set({HEAVY})))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(asynckv.__file__).parent / "py.typed").exists()


def modules_of_users() -> Iterator[types.ModuleType]:
    """What users import, of the integrations those that can be."""
    for name in ("", ".abc", ".connectors", ".testing", ".integrations.bridge"):
        yield importlib.import_module(f"asynckv{name}")
    for name in ("fastapi", "transformers"):
        if importlib.util.find_spec(name):
            yield importlib.import_module(f"asynckv.integrations.{name}")


def public_values() -> Iterator[tuple[str, Callable[..., object]]]:
    """What can be called, or made, of what users import."""
    for module in modules_of_users():
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value


def test_a_public_name_can_be_asked_for_help() -> None:
    for name, value in public_values():
        assert value.__doc__, name
        assert value.__name__ in pydoc.render_doc(value), name
        if not typing.is_typeddict(value):
            inspect.signature(value)


@pytest.mark.parametrize(
    ("name", "more"),
    [("StoreBuffer", set()), ("LookupBuffer", {"is_closed", "open_views"})],
)
def test_help_of_a_buffer_shows_what_its_contract_has(
    name: str, more: set[str]
) -> None:
    kind, contract = getattr(asynckv, name), getattr(asynckv, f"KV{name}")
    shown = {one for one in dir(kind) if not one.startswith("_")} - more
    assert shown - set(dir(contract)) == {"device", "is_on_gpu", "open"}


@pytest.mark.parametrize(
    "name", ["connect", "join_group", "listen_pipe", "open", "open_pipe", "serve"]
)
def test_every_option_is_explained_where_it_is_given(name: str) -> None:
    function = getattr(asynckv, name)
    explained = set(re.findall(r":param (\w+): ", str(inspect.getdoc(function))))
    assert explained == set(inspect.signature(function).parameters)


def public_calls() -> set[str]:
    """The names that users write: of the package, and of what its pages have."""
    modules = ("asynckv", "asynckv.connectors", "asynckv.integrations.fastapi")
    names = {name for m in modules for name in importlib.import_module(m).__all__}
    pages = importlib.import_module("asynckv.abc")
    # What is written by whoever brings a transport or a tier.
    brought = {pages.PayloadTransport, pages.StoreTier, pages.WantedValue}
    for page in (getattr(pages, name) for name in pages.__all__):
        if inspect.isabstract(page) and page not in brought:
            names |= {name for name in vars(page) if not name.startswith("_")}
    for made in (Pipe, Group):  # they have more than their contracts
        names |= {name for name in vars(made) if not name.startswith("_")}
    return names | {"entry_id", "key_tensor", "value_tensor", "layers", "nbytes"}


def test_the_typed_page_of_user_code_makes_every_public_call() -> None:
    code = (Path(__file__).parent / "typing" / "user_code.py").read_text()
    assert public_calls() - set(re.findall(r"\w+", code)) == set()
    assert not re.search(r"\bcast\(|^ *assert |# type: ignore|\bAny\b", code, re.M)
