"""Libraries that are imported while a child process is waited for."""

from __future__ import annotations

import sys
import threading

import pytest

from dispatch.isolation.ahead import Ahead
from tests.fakes import backend, registry_of


@pytest.fixture
def library(tmp_path, monkeypatch):
    """library(source): a module that is on the path, and not imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(source, name="a_library_for_this_test"):
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return make


def backend_with(library):
    cls = backend("a")
    cls.library = library
    return registry_of(cls, backend("without"))


def test_the_library_of_what_was_built_is_there_at_the_end_of_the_block_and_was_imported_on_another_thread(library):
    name = library("import threading; thread = threading.get_ident()")
    with Ahead(backend_with(name), None) as ahead:
        ahead.built("a[max_kv=20]")
        ahead.built("a")
    assert sys.modules[name].thread != threading.get_ident()


def test_one_that_cannot_be_imported_costs_nothing_here(library):
    name = library("raise RuntimeError('no such symbol')")
    with Ahead(backend_with(name), None) as ahead:
        ahead.built("a")
    assert name not in sys.modules


def test_nothing_is_imported_for_a_backend_that_names_no_library_or_was_not_built(library):
    name = library("")
    with Ahead(backend_with(name), None) as ahead:
        ahead.built("without")
    assert name not in sys.modules
