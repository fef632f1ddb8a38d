"""The harness measures what is served: the same lengths for all, every candidate once a round, in shuffled order."""

from __future__ import annotations

import logging
from time import monotonic

import numpy as np
import pytest

import dispatch.bench.chain_layers
import dispatch.bench.rounds
from dispatch.bench.chain_layers import chain_layers
from dispatch.bench.harness import Bench, DefaultFailed
from dispatch.bench.profiles import LogNormal, PlannedCell, plan_cells
from dispatch.bench.proving import GATE_COPIES
from dispatch.bench.rounds import ROUNDS
from dispatch.decision import Reason
from dispatch.errors import MeasureError
from dispatch.gate_inputs import gate_pages
from dispatch.samples import TWIN
from dispatch.traits import EngineTraits
from tests.fakes import ScriptedTimer, backend, device, registry_of, spec_of

MAX_KV = 64
PLENTY = 1 << 30


def steady(name, lengths, sample):
    """Times of which none can be left out: the default's are the longest."""
    return 10.0 if name == "a" else 9.0


def bench_of(*backends, timer=None, grid=(16, 32), bucket=4, free_bytes=PLENTY, **layer):
    spec = spec_of(**layer)
    timer = timer or ScriptedTimer(steady)
    cells = plan_cells(bucket, grid, [LogNormal(0.0), LogNormal(0.5)], MAX_KV, 10_000, ROUNDS)
    return Bench(spec, {bucket: cells}, {"fake": 0}, MAX_KV, registry_of(*backends), timer, device(), free_bytes)


def measure(bench, *names, deadline=None, bucket=4):
    return bench.measure(bucket, names, monotonic() + 60 if deadline is None else deadline, lambda done: None)


def test_every_candidate_is_timed_once_in_every_cell_of_every_round():
    timer = ScriptedTimer(steady)
    samples = measure(bench_of(backend("a"), backend("b"), timer=timer), "a", "b")
    assert samples.candidates == ("a", TWIN, "b")
    assert np.isfinite(samples.times).all()
    assert samples.times.shape == (3, 3, len(samples.cells), ROUNDS)
    assert len(timer.order) == 3 * len(samples.cells) * ROUNDS


def test_all_candidates_of_a_round_see_the_same_lengths_and_each_round_of_a_ragged_cell_new_ones():
    timer = ScriptedTimer(steady)
    measure(bench_of(backend("a"), backend("b"), timer=timer, grid=(32,)), "a", "b")
    steps = [timer.order[i : i + 3] for i in range(0, len(timer.order), 3)]
    assert all(len({lengths for _, lengths in step}) == 1 for step in steps)
    ragged = [step[0][1] for step in steps if len(set(step[0][1])) > 1]
    assert len(set(ragged)) == ROUNDS


def test_a_sample_far_above_the_least_of_its_cell_is_taken_once_more_and_the_faster_one_counts():
    # the recording's eighth step is an outlier: in a cell at a time, its eighth round
    timer = ScriptedTimer(
        lambda name, lengths, sample: 30.0 if (name, sample) == ("b", 7) else steady(name, lengths, sample)
    )
    bench = bench_of(backend("a"), backend("b"), timer=timer, grid=(32,))
    bench.planned = {4: bench.planned[4][:1]}
    samples = measure(bench, "a", "b")
    assert np.array_equal(samples.times[2], np.full((3, 1, ROUNDS), [[[10.0]], [[10.0]], [[9.0]]]))
    assert sum(name == "b" for name, _ in timer.order) == ROUNDS + 1


def test_a_sample_that_cannot_be_true_is_no_measure_for_the_others():
    timer = ScriptedTimer(
        lambda name, lengths, sample: 1e-9 if (name, sample) == ("b", 3) else steady(name, lengths, sample)
    )
    timer.peak_bytes_per_s = 1e12
    bench = bench_of(backend("a"), backend("b"), timer=timer, grid=(32,))
    bench.planned = {4: bench.planned[4][:1]}
    samples = measure(bench, "a", "b")
    assert np.isnan(samples.times[2, 2, 0]).sum() == 1
    assert sum(name == "b" for name, _ in timer.order) == ROUNDS  # none is taken twice


def test_what_takes_long_each_time_keeps_its_time():
    slow = lambda name, lengths, sample: steady(name, lengths, sample) + max(lengths)  # noqa: E731
    samples = measure(bench_of(backend("a"), backend("b"), timer=ScriptedTimer(slow), grid=(32,)), "a", "b")
    for cell, longest in enumerate(samples.longest):
        assert np.array_equal(samples.times[2, 2, cell], 9.0 + longest)


def test_the_order_of_candidates_is_shuffled_between_rounds():
    timer = ScriptedTimer(steady)
    measure(bench_of(backend("a"), backend("b"), backend("c"), timer=timer, grid=(32,)), "a", "b", "c")
    orders = {tuple(name for name, _ in timer.order[i : i + 4]) for i in range(0, len(timer.order), 4)}
    assert len(orders) > 3


def test_plan_and_begin_step_come_before_every_step_because_lengths_have_changed():
    cls = backend("a")
    bench = bench_of(cls, backend("b"))
    measure(bench, "a", "b")
    for impl in cls.built:
        steps = "".join({"plan": "p", "begin_step": "b", "forward": "f"}[call] for call in impl.calls)
        assert steps
        assert steps.replace("pbf", "") == ""


def test_a_candidate_is_not_timed_any_more_in_a_cell_that_it_lost_by_over_ten_percent_in_each_of_the_first_rounds():
    timer = ScriptedTimer(lambda name, lengths, sample: {"a": 10.0, "b": 11.2, "c": 10.9, "d": 9.0}[name])
    samples = measure(bench_of(*(backend(name) for name in "abcd"), timer=timer), *"abcd")
    valid = dict(zip(samples.candidates, np.isfinite(samples.times[2]).sum(axis=-1), strict=True))
    assert valid["b"].tolist() == [5] * len(samples.cells)
    assert valid["d"].tolist() == [ROUNDS] * len(samples.cells)
    assert {(e.candidate, e.reason) for e in samples.exclusions} == {("b", Reason.DROPPED)}
    assert [e.cell for e in samples.exclusions] == list(range(len(samples.cells)))
    assert samples.exclusions[0].detail == "1.12 times the default's time"


def test_a_candidate_that_takes_more_than_one_and_a_half_the_time_is_dropped_after_two_rounds():
    timer = ScriptedTimer(lambda name, lengths, sample: {"a": 10.0, "b": 15.5, "c": 14.5}[name])
    samples = measure(bench_of(backend("a"), backend("b"), backend("c"), timer=timer), "a", "b", "c")
    valid = np.isfinite(samples.times[2]).sum(axis=-1)
    assert valid[2].tolist() == [2] * len(samples.cells)
    assert valid[3].tolist() == [5] * len(samples.cells)


def equal_cells(*means):
    """Cells of 4 requests of the same length in all rounds, so that every round of one lies in the same bins."""
    return tuple(PlannedCell.of(np.full((ROUNDS, 4), mean), mean, "equal") for mean in means)


def test_a_candidate_that_cannot_win_a_cell_any_more_is_not_timed_there_nor_the_default_once_nobody_is():
    # b loses 2% everywhere: of 15 rounds 3 are too many, of 8 and of 7 it is 2, so 5 are enough. c wins at 32 and 64.
    def layer_us(name, lengths, sample):
        return {"b": 10.2, "c": 9.0 if sum(lengths) > 100 else 10.2}.get(name, 10.0)

    bench = bench_of(backend("a"), backend("b"), backend("c"), timer=ScriptedTimer(layer_us))
    bench.planned = {4: equal_cells(16, 32, 64)}
    samples = measure(bench, "a", "b", "c")
    valid = dict(zip(samples.candidates, np.isfinite(samples.times[2]).sum(axis=-1).tolist(), strict=True))
    assert valid == {"a": [5, 15, 15], TWIN: [5, 15, 15], "b": [5, 5, 5], "c": [5, 15, 15]}


def test_a_candidate_that_is_as_fast_as_the_default_is_timed_to_the_end_since_a_box_may_hold_a_tie():
    bench = bench_of(backend("a"), backend("b"), timer=ScriptedTimer(lambda name, lengths, sample: 10.0))
    bench.planned = {4: equal_cells(16)}
    assert np.isfinite(measure(bench, "a", "b").times).all()


def test_a_stored_choice_is_timed_to_the_end_whatever_it_loses():
    timer = ScriptedTimer(lambda name, lengths, sample: 10.0 if name == "a" else 10.2)
    bench = bench_of(backend("a"), backend("b"), backend("c"), timer=timer)
    bench.planned = {4: equal_cells(32)}
    samples = bench.measure(4, ("a", "b", "c"), monotonic() + 60, lambda done: None, stored={"b"})
    assert np.isfinite(samples.times[2, :, 0]).sum(axis=-1).tolist() == [15, 15, 15, 5]


def test_a_candidate_goes_on_in_the_cells_that_it_did_not_lose():
    timer = ScriptedTimer(
        lambda name, lengths, sample: steady(name, lengths, 0) if sum(lengths) < 100 or name == "a" else 20.0
    )
    samples = measure(bench_of(backend("a"), backend("b"), timer=timer), "a", "b")
    short = [cell.mean_kv == 16 for cell in samples.cells]
    assert 0 < sum(short) < len(short)
    assert {e.cell for e in samples.exclusions} == {i for i, is_short in enumerate(short) if not is_short}
    valid = np.isfinite(samples.times[2, 2]).sum(axis=-1)
    assert valid.tolist() == [ROUNDS if is_short else 2 for is_short in short]


def test_one_slow_round_drops_nobody():
    timer = ScriptedTimer(lambda name, lengths, sample: 90.0 if name == "b" and sample < 4 else 10.0)
    samples = measure(bench_of(backend("a"), backend("b"), timer=timer), "a", "b")  # 4 cells: the first round
    assert samples.exclusions == ()


def test_a_candidate_with_wrong_numbers_is_excluded_before_it_is_timed():
    def doubled(impl, q, out):
        out.mul_(2)

    timer = ScriptedTimer(lambda name, lengths, sample: 1.0)
    samples = measure(bench_of(backend("a"), backend("wrong", after=doubled), timer=timer), "a", "wrong")
    assert [(e.candidate, e.reason) for e in samples.exclusions] == [("wrong", Reason.GATE_FAILED)]
    assert "wrong" not in {name for name, _ in timer.order}
    assert np.isnan(samples.times[:, 2]).all()


@pytest.mark.parametrize("how", [{"build_error": MemoryError("no room\nfor it")}, {"build_error": ValueError("odd")}])
def test_a_candidate_that_cannot_be_built_is_excluded_and_the_others_are_measured(how):
    samples = measure(bench_of(backend("a"), backend("broken", **how), backend("c")), "a", "broken", "c")
    (excluded,) = samples.exclusions
    assert (excluded.candidate, excluded.reason, excluded.cell) == ("broken", Reason.FAILED, None)
    assert "\n" not in excluded.detail
    assert np.isfinite(samples.times[2, samples.candidates.index("c")]).all()


def test_a_candidate_that_fails_in_one_cell_loses_that_cell_alone():
    def layer_us(name, lengths, sample):
        if name == "b" and set(lengths) == {32}:
            raise MemoryError("no room")
        return steady(name, lengths, sample)

    samples = measure(bench_of(backend("a"), backend("b"), timer=ScriptedTimer(layer_us)), "a", "b")
    failed = {e.cell for e in samples.exclusions}
    assert failed == {i for i, c in enumerate(samples.cells) if (c.mean_kv, c.profile) == (32, "equal")}
    assert len(samples.exclusions) == 1
    assert np.isfinite(np.delete(samples.times[2, 2], list(failed), axis=0)).all()


def test_the_samples_of_a_cell_are_begun_before_those_of_the_cell_before_are_read():
    timer = ScriptedTimer(steady)
    samples = measure(bench_of(backend("a"), backend("b"), timer=timer), "a", "b")
    cells = len(samples.cells)
    assert cells > 2
    # each three samples: of the first cell, the second, then what was begun before; at a round's end nothing is left
    expected = (["start"] + ["start", "read"] * (cells - 1) + ["read"]) * ROUNDS
    steps = [timer.events[i : i + 3] for i in range(0, len(timer.events), 3)]
    assert [step[0][0] for step in steps] == expected
    assert all(len({what for what, _ in step}) == 1 for step in steps)
    names = {what: [name for step in steps for its, name in step if its == what] for what in ("start", "read")}
    assert names["start"] == names["read"]


def test_a_candidate_that_fails_when_it_is_read_loses_that_cell_alone_and_costs_the_others_nothing():
    def layer_us(name, lengths, sample):
        def read():
            raise MemoryError("no room")

        return read if name == "b" and set(lengths) == {32} else steady(name, lengths, sample)

    samples = measure(bench_of(backend("a"), backend("b"), timer=ScriptedTimer(layer_us)), "a", "b")
    ((failed, detail),) = [(e.cell, e.detail) for e in samples.exclusions]
    assert (samples.cells[failed].mean_kv, samples.cells[failed].profile) == (32, "equal")
    assert detail == "MemoryError: no room"
    assert np.isfinite(np.delete(samples.times[2, 2], failed, axis=0)).all()
    assert np.isfinite(samples.times[2, :2, failed, 0]).all()


def test_a_sample_is_taken_once_more_on_the_same_lengths_at_the_end_of_its_round():
    cells = 3
    timer = ScriptedTimer(  # the fourth round of the second cell
        lambda name, lengths, sample: 30.0 if (name, sample) == ("b", 3 * cells + 1) else steady(name, lengths, 0)
    )
    bench = bench_of(backend("a"), backend("b"), timer=timer)
    # the second a ragged one: other lengths in each round
    bench.planned = {4: (bench.planned[4][0], bench.planned[4][1], bench.planned[4][-1])}
    samples = measure(bench, "a", "b")
    a_round = cells * 3
    fourth = timer.order[3 * a_round : 4 * a_round + 1]
    assert [name for name, _ in fourth].count("b") == cells + 1
    assert fourth[-1] == ("b", fourth[3][1])
    assert fourth[-1][1] not in {lengths for _, lengths in fourth[:3] + fourth[6:-1]}
    assert samples.times[2, 2, 1, 3] == 9.0
    assert len(timer.order) == ROUNDS * a_round + 1


def test_of_a_sample_that_is_taken_twice_the_faster_one_counts_though_it_was_the_first():
    def layer_us(name, lengths, sample):
        return {7: 30.0, 8: 40.0}.get(sample, 9.0) if name == "b" else 10.0

    bench = bench_of(backend("a"), backend("b"), timer=ScriptedTimer(layer_us), grid=(32,))
    bench.planned = {4: bench.planned[4][:1]}
    samples = measure(bench, "a", "b")
    assert samples.times[2, 2, 0].tolist() == [9.0] * 7 + [30.0] + [9.0] * 7


def test_a_plan_that_the_engine_hides_makes_no_sample_an_outlier():
    timer = ScriptedTimer(steady, plan_us=lambda name: 50.0 if name == "b" else 0.0)
    bench = bench_of(backend("a"), backend("b"), timer=timer, grid=(32,))
    bench.traits = EngineTraits(plan_hidden=True)
    samples = measure(bench, "a", "b")
    assert len(timer.order) == ROUNDS * 3 * len(samples.cells)


def test_what_has_begun_when_the_time_ends_is_read_and_kept(monkeypatch):
    timer = ScriptedTimer(steady)
    bench = bench_of(backend("a"), backend("b"), timer=timer)
    cells = len(bench.planned[4])
    clock = iter([0.0] * (cells + 2) + [10.0**9])  # a look in each cell: two of the second round
    monkeypatch.setattr(dispatch.bench.rounds, "monotonic", lambda: next(clock))
    samples = measure(bench, "a", "b")
    valid = np.isfinite(samples.times[2]).all(axis=0).sum(axis=1)
    assert valid.tolist() == [2, 2] + [1] * (cells - 2)
    assert [what for what, _ in timer.events].count("read") == len(timer.order) == 3 * (cells + 2)


def test_no_sample_is_taken_once_more_when_the_time_is_over(monkeypatch):
    timer = ScriptedTimer(
        lambda name, lengths, sample: 30.0 if name == "b" and sample == 1 else steady(name, lengths, 0)
    )
    bench = bench_of(backend("a"), backend("b"), timer=timer, grid=(32,))
    bench.planned = {4: bench.planned[4][:1]}
    clock = iter([0.0, 0.0, 10.0**9, 10.0**9])  # two rounds, then what is taken once more, then the third
    monkeypatch.setattr(dispatch.bench.rounds, "monotonic", lambda: next(clock))
    samples = measure(bench, "a", "b")
    assert samples.times[2, 2, 0, :3].tolist() == [9.0, 30.0, pytest.approx(np.nan, nan_ok=True)]
    assert len(timer.order) == 2 * 3


def test_progress_is_told_of_what_has_been_read_and_what_it_raises_leaves_nothing_unread():
    timer = ScriptedTimer(steady)
    bench = bench_of(backend("a"), backend("b"), timer=timer)
    told = []

    def progress(done):
        told.append((done, [what for what, _ in timer.events].count("read")))
        if len(told) == 3:
            raise MeasureError("hot")

    with pytest.raises(MeasureError, match="hot"):
        bench.measure(4, ("a", "b"), monotonic() + 60, progress)
    assert told == [(0, 0), (3, 3), (6, 6)]
    assert [what for what, _ in timer.events].count("read") == len(timer.order) == 9


def test_progress_is_told_of_all_samples_at_the_end():
    told = []
    bench = bench_of(backend("a"), backend("b"))
    bench.measure(4, ("a", "b"), monotonic() + 60, told.append)
    assert told[-1] == 3 * len(bench.planned[4]) * ROUNDS
    assert told == sorted(told)


def test_a_default_with_wrong_numbers_is_told_and_nothing_is_measured_against_it():
    with pytest.raises(DefaultFailed, match="the default a: random: row "):
        measure(bench_of(backend("a", after=lambda impl, q, out: out.mul_(2)), backend("b")), "a", "b")


def test_a_narrow_tactic_does_not_shorten_what_the_others_are_checked_with():
    def zeros_when_long(impl, q, out):
        out[impl.inputs.lengths > 30] = 0

    narrow, wrong = backend("a", tactics=("", "max_kv=20")), backend("wrong", after=zeros_when_long)
    samples = measure(bench_of(narrow, wrong), "a", "a[max_kv=20]", "wrong")
    assert [(e.candidate, e.reason) for e in samples.exclusions] == [("wrong", Reason.GATE_FAILED)]


@pytest.mark.parametrize("time", [float("nan"), float("inf"), 1e13])
def test_a_time_that_cannot_be_costs_that_sample_alone(time):
    timer = ScriptedTimer(
        lambda name, lengths, sample: time if name == "b" and sample < 3 else steady(name, lengths, 0)
    )
    samples = measure(bench_of(backend("a"), backend("b"), timer=timer, grid=(16,)), "a", "b")
    assert len(samples.cells) == 3  # so that the first round is the first three samples
    assert np.isnan(samples.times[:, 2, :, 0]).all()
    assert np.isfinite(samples.times[:, 2, :, 1:]).all()


def test_a_part_just_below_zero_is_zero():
    timer = ScriptedTimer(steady, plan_us=lambda name: -0.2)
    assert (measure(bench_of(backend("a"), backend("b"), timer=timer), "a", "b").times[0] == 0).all()


def test_plan_counts_as_nothing_where_the_engine_hides_it():
    timer = ScriptedTimer(steady, plan_us=lambda name: 50.0)
    bench = bench_of(backend("a"), backend("b"), timer=timer)
    bench.traits = EngineTraits(plan_hidden=True)
    plan, _, layer = measure(bench, "a", "b").times
    assert (plan == 0).all() and (layer[:2] == 10).all() and (layer[2:] == 9).all()


def test_every_candidate_is_recorded_with_the_longest_row_whoever_failed_before_it():
    seen = []

    class Timer(ScriptedTimer):
        def record(self, impl, inputs, chain):
            seen.append(inputs.lengths_host.tolist())
            return super().record(impl, inputs, chain)

    timer = Timer(lambda name, lengths, sample: 10.0)
    wrong = backend("wrong", after=lambda impl, q, out: out.mul_(2))
    measure(bench_of(backend("a"), wrong, backend("c"), timer=timer), "a", "wrong", "c")
    assert len({tuple(lengths) for lengths in seen}) == 1
    assert seen[0][0] == MAX_KV


def test_what_is_timed_is_random_pages_again_and_not_what_the_gate_wrote():
    bench = bench_of(backend("a"), backend("b"))
    measure(bench, "a", "b")
    for pages in (pages for cache in bench.pool.kv_caches for pages in cache):
        assert 0.8 < pages.std() < 1.2  # unit normals


def test_when_the_time_ends_what_was_measured_is_kept():
    now = monotonic()
    samples = measure(bench_of(backend("a"), backend("b")), "a", "b", deadline=now - 1)
    assert np.isnan(samples.times).all()


def test_a_tactic_for_short_requests_is_not_timed_beyond_them():
    def beyond_its_table(impl, q, out):
        out[impl.inputs.lengths > impl.max_kv] = float("nan")

    wide = backend("a", tactics=("", "max_kv=20"), after=beyond_its_table)
    samples = measure(bench_of(wide, grid=(16, 32)), "a", "a[max_kv=20]")
    assert wide.built[-1].max_kv == 20
    assert samples.exclusions == ()  # the gate did not ask it for longer ones either
    timed = np.isfinite(samples.times[2, 2])
    assert timed.tolist() == (samples.longest <= 20).tolist()
    assert timed.any() and not timed.all()


def test_each_layer_of_the_chain_has_pages_of_its_own():
    timer = ScriptedTimer(steady, chain_layers=3)
    bench = bench_of(backend("a"), timer=timer)
    assert len({cache[0].data_ptr() for cache in bench.pool.kv_caches}) == 3


def test_pages_come_in_a_new_order_in_every_round(monkeypatch):
    bench = bench_of(backend("a"), backend("b"))
    shuffles = []
    monkeypatch.setattr(bench.pool, "shuffle", lambda: shuffles.append(1))
    measure(bench, "a", "b")
    assert len(shuffles) == ROUNDS


@pytest.mark.parametrize(
    ("window", "layers"),
    [(None, {16: 3, 32: 2, 64: 1}), (8, {16: 3, 32: 3, 64: 3})],  # 4 rows of a window of 8 tokens read 32 tokens
)
def test_long_layers_are_timed_a_few_at_a_time_by_what_they_read(monkeypatch, window, layers):
    token_bytes = spec_of().kv_bytes_per_token
    monkeypatch.setattr(
        dispatch.bench.chain_layers, "LONG_LAYER_BYTES", (100 * token_bytes, 200 * token_bytes)
    )  # between 4 x 16, 4 x 32 and 4 x 64 tokens
    timer = ScriptedTimer(steady, chain_layers=3)
    timer.chain_layers = (3, 2, 1)
    seen = {}
    bench = bench_of(backend("a"), timer=timer, sliding_window=window)
    for planned in bench.planned[4]:
        seen[planned.cell.mean_kv] = chain_layers(bench.pool, timer, planned)
    assert {mean_kv: seen[mean_kv] for mean_kv in layers} == layers


def test_the_chain_is_shortened_to_what_fits_into_memory():
    timer = ScriptedTimer(steady, chain_layers=3)
    spec = spec_of()
    pages = bench_of(backend("a"), timer=timer).pool.num_pages + 1
    one = pages * spec.page_size * spec.kv_bytes_per_token
    copies = GATE_COPIES * gate_pages(spec, 4, MAX_KV) * spec.page_size * spec.kv_bytes_per_token
    assert len(bench_of(backend("a"), timer=timer, free_bytes=copies + 2 * one).pool.kv_caches) == 2
    with pytest.raises(MeasureError, match="one layer's pages need"):
        bench_of(backend("a"), timer=timer, free_bytes=copies + one - 1)


def test_backends_of_one_family_share_a_scratch_sized_for_the_largest_and_families_do_not():
    spec = spec_of()
    timer = ScriptedTimer(steady)
    cells = plan_cells(4, (16,), [LogNormal(0.0)], MAX_KV, 10_000, ROUNDS)
    a, b, c = backend("a", family="one"), backend("b", family="one"), backend("c", family="two")
    sizes = {"one": 64, "two": 32}
    bench = Bench(spec, {4: cells}, sizes, MAX_KV, registry_of(a, b, c), timer, device(), PLENTY)
    measure(bench, "a", "b", "c")
    assert a.built[0].workspace.data_ptr() == b.built[0].workspace.data_ptr() != c.built[0].workspace.data_ptr()
    assert (a.built[0].workspace.numel(), c.built[0].workspace.numel()) == (64, 32)


def test_a_scratch_never_grows_once_it_was_given_out():
    bench = bench_of(backend("a"))
    measure(bench, "a")
    with pytest.raises(MeasureError, match="asked for after"):
        bench.workspaces.reserve("fake", 1)


# 256 bytes a token, 4 rows, 97% of 1e9 bytes/s: 16 tokens a row take at least 16.9 us, 32 a row 33.8, 64 a row 67.6
def impossible(spec, times, **bench):
    timer = ScriptedTimer(lambda name, lengths, sample: times(name, sum(lengths)))
    timer.peak_bytes_per_s = 1e9
    return measure(bench_of(backend("a"), backend("b"), timer=timer, **spec, **bench), "a", "b")


def test_a_candidate_faster_than_the_memory_has_no_times_where_it_claims_to_be(caplog):
    with caplog.at_level(logging.INFO):
        samples = impossible({}, lambda name, tokens: 20.0 if name == "b" else 70.0)
    timed = {cell.mean_kv for c, cell in enumerate(samples.cells) if np.isfinite(samples.times[2, 2, c]).any()}
    assert {cell.mean_kv for cell in samples.cells} - timed == {32, 64}
    assert "of KV read in 20.000 us: a measurement error" in caplog.text


def test_a_layer_with_a_sliding_window_is_not_suspected_of_the_tokens_that_it_does_not_read():
    samples = impossible({"sliding_window": 8}, lambda name, tokens: 9.0)  # 8 tokens a row take 8.4 us
    assert samples.exclusions == ()
