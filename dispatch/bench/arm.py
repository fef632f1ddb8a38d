"""What is timed: an arm, and a sample of one that has begun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dispatch.bench.timer import Recording, StepTime


@dataclass
class Arm:
    """A candidate (or the default's twin), built and recorded. `index`: its row in the samples."""

    index: int
    name: str
    recording: Recording
    longest: int
    lost_cells: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Begun:
    """A sample that the device may still be busy with. `read` waits for its end."""

    arm: Arm
    cell: int
    round: int
    read: Callable[[], StepTime]
