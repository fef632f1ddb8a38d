"""The smoke test's forced plan: it takes the place of a measured one, in the engine's own choice."""

from __future__ import annotations

from dispatch.candidate import Candidate
from dispatch.config import DispatchConfig
from dispatch.engine import LayerGroup, choose
from dispatch.engine.ranks import ALONE
from dispatch.request import TuneRequest
from smoke.vllm.forced import ROUND, force
from tests.fakes import CPU, backend, registry_of, spec_of


def test_a_forced_plan_names_another_kernel_for_each_batch_size(monkeypatch):
    monkeypatch.setattr(choose, "obtain_plan", None)  # put back behind the test
    force()
    names = {Candidate.parse(name).backend for name in ROUND}
    registry = registry_of(backend("default"), *(backend(name) for name in sorted(names)))
    spec = spec_of()
    request = TuneRequest(spec, (1, 2, 4, 8, 16), 64, 1000, DispatchConfig())
    (choice,) = choose.choose([LayerGroup(spec, (0,))], request, CPU, registry, "", ALONE)
    assert not choice.why
    assert [
        str(Candidate(e.backend, e.tactic)) for e in (choice.table.lookup(b, 32, 1000) for b in request.buckets)
    ] == [*ROUND]
