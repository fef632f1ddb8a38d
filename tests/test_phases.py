"""Where the time went: every second once, in the innermost phase; and `tune --profile-time` prints it."""

from __future__ import annotations

import dispatch.bench.phases
from dispatch.bench.phases import Phases
from dispatch.cli.render import console, phases_view


def test_a_phase_inside_another_is_counted_once_as_itself(monkeypatch):
    clock = iter([0, 1, 3, 6, 10, 15])
    monkeypatch.setattr(dispatch.bench.phases, "perf_counter", lambda: next(clock))
    phases = Phases()
    with phases("outer"), phases("inner"):  # inner 1 to 3, outer 0 to 1 and 3 to 6
        pass
    with phases("inner"):  # 10 to 15
        pass
    assert phases.seconds == {"outer": 4, "inner": 7}


def test_a_phase_that_ends_in_an_error_is_counted(monkeypatch):
    clock = iter([0, 2])
    monkeypatch.setattr(dispatch.bench.phases, "perf_counter", lambda: next(clock))
    phases = Phases()
    try:
        with phases("fails"):
            raise ValueError
    except ValueError:
        pass
    assert phases.seconds == {"fails": 2}


def test_the_table_shows_the_most_first_with_shares_and_names_as_they_are():
    terminal = console()
    with terminal.capture() as printed:
        terminal.print(phases_view({"samples: fa3[num_splits=8]": 1.0, "gate": 3.0}))
    text = printed.get()
    assert text.index("gate") < text.index("samples: fa3[num_splits=8]")
    assert "75%" in text and "25%" in text and "4.0 s in all" in text
