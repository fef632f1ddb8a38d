"""The registry, and backends that come from outside through the entry point group."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from dispatch.backends import Registry, registry
from dispatch.backends.registry import BUILT_IN
from dispatch.errors import RegistryError
from tests.fakes import CPU, backend, registry_of, spec_of


def test_a_name_that_is_taken_is_refused():
    taken = registry_of(backend("mine"))
    with pytest.raises(RegistryError, match="'mine' is registered already"):
        taken.register("mine", lambda: backend("mine"))


def test_an_unknown_name_is_answered_with_what_there_is():
    with pytest.raises(RegistryError, match=r"no backend 'fa9'; there are fa3, .*torch_sdpa, torch_chunked"):
        registry.get("fa9")


@pytest.mark.parametrize(
    ("capability", "first"),
    [
        ((8, 0), "flashinfer_fa2_tc"),
        ((9, 0), "fa3"),
        ((10, 0), "flashinfer_trtllm_gen"),
        ((12, 0), "flashinfer_fa2_tc"),
    ],
)
def test_the_architectures_own_kernel_comes_first_and_torch_last(capability, first):
    order = registry.priority(replace(CPU, kind="cuda", capability=capability))
    assert order[0] == first
    assert order[-2:] == ("torch_sdpa", "torch_chunked")
    assert sorted(order) == sorted(registry.names())


def test_on_sm90_the_order_is_that_of_engines():
    assert registry.priority(replace(CPU, kind="cuda", capability=(9, 0)))[:5] == (
        "fa3",
        "flashinfer_fa2_tc",
        "flashinfer_xqa",
        "flashinfer_cudnn",
        "flashinfer_fa2",
    )


def test_a_name_that_a_candidate_cannot_carry_is_refused():
    with pytest.raises(RegistryError, match="a name is a letter, then"):
        Registry().register("my kernel!", lambda: backend("x"))


def test_a_backend_is_imported_when_it_is_first_asked_for_and_once():
    loads = []
    lazy = Registry()
    lazy.register("mine", lambda: loads.append(1) or backend("mine"))
    assert loads == []
    assert lazy.get("mine") is lazy.get("mine")
    assert loads == [1]


def test_a_backend_whose_import_fails_is_refused_with_the_reason_and_the_others_stay():
    def missing():
        raise ImportError("no module named fancy\nand a long story")

    both = registry_of(backend("good"))
    both.register("broken", missing)
    assert both.support("good", spec_of(), CPU).ok
    refusal = both.support("broken", spec_of(), CPU)
    assert not refusal.ok
    assert refusal.reason == "backend 'broken' cannot be imported: ImportError: no module named fancy"


def test_a_backend_whose_support_raises_is_refused_with_the_reason():
    cls = backend("rude")
    cls.support = lambda self, spec, device: 1 / 0
    assert registry_of(cls).support("rude", spec_of(), CPU).reason == (
        "support() raised ZeroDivisionError: division by zero"
    )


def test_a_backend_without_an_installed_package_has_no_version():
    cls = backend("mine")
    cls.distribution = "not-a-package-of-anyone"
    assert registry_of(cls).version("mine") == ""


PLUGIN = """
    from dispatch.backends import SUPPORTED
    from dispatch.backends.torch_sdpa import TorchSdpa

    class Mine(TorchSdpa):
        family = "mine"
        distribution = "my-plugin"

        def support(self, spec, device):
            return SUPPORTED
"""


@pytest.fixture
def run_with_plugin(tmp_path):
    """Run code in a fresh process in which a user's package offers backends through its entry points."""

    def run(entry_points, code):
        (tmp_path / "my_plugin.py").write_text(textwrap.dedent(PLUGIN))
        info = tmp_path / "my_plugin-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("[dispatch.backends]\n" + entry_points)
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + textwrap.dedent(code)
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    return run


def test_a_users_backend_is_found_through_the_entry_point_group_and_tuned_like_the_others(run_with_plugin):
    code = """
        from dispatch import AttentionSpec, DispatchConfig, TuneRequest, current_device, registry
        from dispatch.tuner import tune

        spec = AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim_qk=8, head_dim_vo=8, page_size=4, num_layers=1)
        plan, samples = tune(TuneRequest(spec, (1,), 16, 16), current_device("cpu"), registry, lambda *a: None)
        print(registry.names()[-3:], plan.key["backends"]["mine"], "mine" in samples.buckets[0].candidates)
    """
    done = run_with_plugin("mine = my_plugin:Mine\n", code)
    assert done.stdout == "('torch_sdpa', 'torch_chunked', 'mine') 1.2 True\n"


def test_a_users_backend_under_a_taken_name_is_left_out_with_a_warning_and_nothing_fails(run_with_plugin):
    code = "from dispatch import registry; print(type(registry.get('torch_sdpa')).__module__)"
    done = run_with_plugin("torch_sdpa = my_plugin:Mine\n", code)
    assert done.stdout == "dispatch.backends.torch_sdpa\n"
    assert "'torch_sdpa' is registered already" in done.stderr


def test_a_users_backend_that_cannot_be_imported_is_refused_and_nothing_fails(run_with_plugin):
    code = """
        from dispatch import registry
        from tests.fakes import CPU, spec_of
        print(registry.support("mine", spec_of(), CPU).reason)
    """
    done = run_with_plugin("mine = my_plugin:Absent\n", code)
    assert "cannot be imported: AttributeError" in done.stdout


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_library_that_a_built_in_backend_names_is_what_its_build_imports(name):
    backend = registry.get(name)
    imported = set(re.findall(r'import_module\("(.+?)"\)', inspect.getsource(inspect.getmodule(type(backend)))))
    others = {name for name in imported if not name.startswith("dispatch.")}
    assert others == ({backend.library} if backend.library else set())
