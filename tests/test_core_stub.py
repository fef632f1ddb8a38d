"""The stub that type checkers read says what the built module has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dispatch
from dispatch import _core

STUB = ast.parse(Path(dispatch.__path__[0], "_core.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
MEMBERS = {
    (class_name, node.name): node
    for class_name, body in CLASSES.items()
    for node in body.body
    if isinstance(node, ast.FunctionDef)
}


def decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(decorator) for decorator in node.decorator_list}


def built_signature(function: object) -> ast.FunctionDef:
    """pybind11 begins each docstring with the signature, which is Python but for its `def`."""
    signature = str(function.__doc__).split("\n")[0]
    node = ast.parse(f"def {signature}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def parameters(node: ast.FunctionDef) -> tuple[list[str], list[str], list[str]]:
    names = [argument.arg for argument in node.args.posonlyargs + node.args.args]
    keyword_only = [argument.arg for argument in node.args.kwonlyargs]
    return names, keyword_only, [ast.unparse(default) for default in node.args.defaults]


def public(namespace: object) -> set[str]:
    return {name for name in vars(namespace) if not name.startswith("_")}


def test_stub_and_module_have_the_same_public_names() -> None:
    assert public(_core) == CLASSES.keys() | FUNCTIONS.keys()


@pytest.mark.parametrize("class_name", CLASSES)
def test_stub_and_module_have_the_same_members(class_name: str) -> None:
    built = vars(getattr(_core, class_name))
    stubbed = {name for owner, name in MEMBERS if owner == class_name}
    assert public(getattr(_core, class_name)) == {name for name in stubbed if not name.startswith("_")}
    assert stubbed <= built.keys()


@pytest.mark.parametrize("member", MEMBERS, ids=".".join)
def test_member_has_the_stubs_kind_and_parameters(member: tuple[str, str]) -> None:
    class_name, name = member
    built_class = getattr(_core, class_name)
    node = MEMBERS[member]
    kinds = {"property": property, "staticmethod": staticmethod}
    built_kinds = {text for text, kind in kinds.items() if isinstance(vars(built_class)[name], kind)}
    assert built_kinds == decorators(node)
    if "property" not in built_kinds:
        assert parameters(built_signature(getattr(built_class, name))) == parameters(node)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_has_the_stubs_parameters(name: str) -> None:
    assert parameters(built_signature(getattr(_core, name))) == parameters(FUNCTIONS[name])


def test_the_docstrings_of_stub_and_module_agree() -> None:
    for (class_name, name), node in MEMBERS.items():
        stubbed = ast.get_docstring(node)
        if stubbed is not None:
            assert str(getattr(getattr(_core, class_name), name).__doc__).split("\n\n", 1)[1].strip() == stubbed
