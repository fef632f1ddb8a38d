"""Not measured: on a GPU where another computes, at throttled clocks, and what no memory can do."""

from __future__ import annotations

import os
import sys
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dispatch.bench import sanity
from dispatch.bench.nvml import Nvml, open_nvml
from dispatch.bench.sanity import GpuWatch, check_bandwidth, nominal_bandwidth, watch_for
from dispatch.errors import MeasureError
from tests.fake_nvml import (
    APPLICATION_CLOCKS,
    HARDWARE,
    IDLE,
    POWER_CAP,
    SYNC_BOOST,
    THERMAL,
    FakeNvml,
    NVMLError,
    watch_of,
)
from tests.fakes import CPU, spec_of


@pytest.fixture(autouse=True)
def slept(monkeypatch):
    """Seconds that a watch waited, without waiting."""
    seconds = []
    monkeypatch.setattr(sanity, "sleep", seconds.append)
    clock = count()
    monkeypatch.setattr(sanity, "monotonic", lambda: next(clock))  # a second between any two looks
    return seconds


def test_an_idle_gpu_is_not_refused_and_costs_a_fraction_of_a_second(slept):
    assert watch_of().refusal() == ""
    assert sum(slept) < 0.5


def test_while_another_process_computes_tuning_is_refused_with_its_pid(slept):
    why = watch_of(busy=[87], pids={4711: 80}).refusal()
    assert why == "another process (PID 4711) computes on the GPU, which is 87% busy: tune when it is idle"
    assert sum(slept) < 2.5


def test_a_process_that_the_driver_does_not_name_is_refused_all_the_same():
    assert watch_of(busy=[87], pids=None).refusal().startswith("another process computes on the GPU")


def test_what_this_process_computed_before_does_not_count():
    # the driver's figure is of the last second: full, then in part, then nothing of this process is left in it
    assert watch_of(busy=[100] * 10 + [40] * 10 + [0], pids={os.getpid(): 100}).refusal() == ""


def test_neither_this_process_nor_a_stale_entry_is_named_when_another_computes():
    pids = {os.getpid(): 50, 4711: 37, 99: 0, 98: 4_000_000_000, 0: 5}
    assert "(PID 4711)" in watch_of(busy=[87], pids=pids).refusal()


def test_a_moment_without_work_does_not_make_a_busy_gpu_idle():
    assert "another process" in watch_of(busy=[90, 0, 0] * 40).refusal()


def test_a_desktop_that_draws_itself_is_no_reason_to_refuse():
    assert watch_of(busy=[5]).refusal() == ""


@pytest.mark.parametrize("bits", [THERMAL, HARDWARE | POWER_CAP, 0x20, 0x80])
def test_clocks_that_throttle_before_the_start_are_refused(bits):
    assert watch_of(bits=[bits]).refusal().startswith("clocks throttle: ")


def test_a_slowdown_is_named():
    assert watch_of(bits=[THERMAL | 0x80]).refusal() == (
        "clocks throttle: hardware thermal slowdown, hardware power brake"
    )


@pytest.mark.parametrize("bits", [IDLE, POWER_CAP, APPLICATION_CLOCKS, SYNC_BOOST, 0x100])
def test_clocks_that_are_as_they_will_also_serve_are_not_throttled(bits):
    watch = watch_of(bits=[bits])
    assert [watch.refusal(), watch.throttling(), watch.throttling()] == ["", "", ""]


def test_a_slowdown_seen_once_is_a_change_of_clocks_and_seen_twice_is_throttling():
    watch = watch_of(bits=[HARDWARE, 0, HARDWARE, THERMAL, THERMAL])
    told = [watch.throttling() for _ in range(5)]
    assert told == ["", "", "", "", "clocks throttle: hardware thermal slowdown"]


def test_a_driver_that_knows_the_slowdowns_by_their_old_name_is_understood():
    class Old(FakeNvml):
        nvmlDeviceGetCurrentClocksThrottleReasons = FakeNvml.nvmlDeviceGetCurrentClocksEventReasons

        def nvmlDeviceGetCurrentClocksEventReasons(self, gpu):
            raise NVMLError("Function Not Found")

    assert "thermal" in GpuWatch(Nvml(Old(bits=[THERMAL]), "gpu")).refusal()


def test_what_the_driver_does_not_tell_is_not_held_against_the_gpu(slept):
    watch = watch_of(busy=None, bits=None, bus_bits=None)
    assert [watch.refusal(), watch.throttling()] == ["", ""]
    assert slept == []
    assert watch.describe() == "none (not told by the driver: bandwidth, other processes, throttled clocks)"


def test_clocks_are_looked_at_where_the_load_is_not_told():
    assert "thermal" in watch_of(busy=None, bits=[THERMAL]).refusal()


def test_the_checks_are_described_in_one_line():
    assert watch_of().describe() == "bandwidth up to 4.92 TB/s, other processes, throttled clocks"
    assert watch_of(busy=None).describe() == (
        "bandwidth up to 4.92 TB/s, throttled clocks (not told by the driver: other processes)"
    )
    assert watch_for(CPU).describe() == "none (on a CPU)"


@pytest.mark.parametrize(
    ("clock_mhz", "bus_bits", "sheet"),
    [(3201, 6144, 4.8e12), (2619, 5120, 3.35e12), (1593, 5120, 2.039e12), (10501, 384, 1.008e12)],
    ids=["H200", "H100 SXM", "A100 80GB", "RTX 4090"],
)
def test_the_bandwidth_is_two_bits_a_clock_on_every_line_of_the_bus(clock_mhz, bus_bits, sheet):
    peak = Nvml(FakeNvml(clock_mhz=clock_mhz, bus_bits=bus_bits), "gpu").peak_bytes_per_s()
    assert peak == pytest.approx(sheet, rel=0.03)
    assert peak >= 0.999 * sheet


@pytest.fixture
def installed(monkeypatch):
    """pynvml as given, and a CUDA device 1 of torch's whose UUID is ab-cd."""

    def install(library):
        monkeypatch.setitem(sys.modules, "pynvml", library)
        properties = {torch.device("cuda", 1): SimpleNamespace(uuid="ab-cd")}
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device])
        return torch.device("cuda", 1)

    return install


def test_the_gpu_is_found_by_its_uuid_because_nvml_and_cuda_count_differently(installed):
    library = FakeNvml()
    library.nvmlInit = lambda: None
    library.nvmlDeviceGetHandleByUUID = {"GPU-ab-cd": "gpu"}.__getitem__
    assert nominal_bandwidth(installed(library)) == pytest.approx(4.917e12, rel=1e-3)


def test_without_pynvml_nothing_is_checked_and_nothing_is_raised(installed):
    nvml = open_nvml(installed(None))  # importing it raises ModuleNotFoundError
    assert nvml.peak_bytes_per_s() is None
    assert GpuWatch(nvml).refusal() == ""
    assert GpuWatch(nvml).describe().startswith("none (ModuleNotFoundError: ")


def test_without_a_driver_nothing_is_checked_and_nothing_is_raised(installed):
    def no_driver():
        raise NVMLError("Driver Not Loaded")

    nvml = open_nvml(installed(SimpleNamespace(nvmlInit=no_driver)))
    assert GpuWatch(nvml).describe() == "none (NVMLError: Driver Not Loaded)"


# 4/2 heads, d 16, float32: 2 * (16 + 16) * 4 = 256 bytes a token. Two rows of 1000 tokens: 512,000 bytes, which at 97%
# of 1e12 bytes/s take 0.528 us.
PEAK = 1e12
LENGTHS = np.array([1000, 1000])


def test_a_layer_faster_than_its_kv_can_be_read_is_an_error_that_says_so():
    check_bandwidth(spec_of(), LENGTHS, 0.529, PEAK)
    with pytest.raises(MeasureError, match=r"512000 bytes of KV read in 0\.527 us: .* above 97% of the 1\.00 TB/s"):
        check_bandwidth(spec_of(), LENGTHS, 0.527, PEAK)


@pytest.mark.parametrize("layer_us", [0.0, -1.0])
def test_a_layer_that_takes_no_time_is_an_error(layer_us):
    with pytest.raises(MeasureError, match="a measurement error"):
        check_bandwidth(spec_of(), LENGTHS, layer_us, PEAK)


def test_of_a_sliding_window_only_what_is_visible_of_each_row_is_read():
    window = spec_of(sliding_window=100)  # the short row shows its 50: 150 tokens, 38,400 bytes, 0.0396 us
    check_bandwidth(window, np.array([50, 10_000]), 0.040, PEAK)
    with pytest.raises(MeasureError, match="38400 bytes"):
        check_bandwidth(window, np.array([50, 10_000]), 0.039, PEAK)


def test_where_the_bandwidth_is_not_known_no_time_is_an_error():
    check_bandwidth(spec_of(), LENGTHS, 0.0, None)
