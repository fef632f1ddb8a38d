"""One case run: passed, failed or skipped, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from dispatch.errors import one_line
from smoke.place import Found, Place, Skipped

SHOWN_REASONS = 6
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass
class Outcome:
    """`why`: what failed, or why it was skipped. `log`: warnings of the package while it ran."""

    case: str
    status: str
    seconds: float
    why: list[str] = field(default_factory=list)
    tokens: int = 0
    near_ties: int = 0
    largest_error: float = 0.0
    tolerance: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def line(self) -> str:
        """For a person."""
        head = f"{self.status:7} {self.case:14} {self.seconds:6.1f} s"
        if self.tokens:
            head += (
                f"  {self.tokens} tokens, {self.near_ties} near ties went the other way; "
                f"logits off by up to {self.largest_error:.3f} of {self.tolerance} allowed"
            )
        shown = self.why[:SHOWN_REASONS]
        if len(self.why) > len(shown):
            shown.append(f"and {len(self.why) - len(shown)} more")
        return "\n".join([head, *(f"        {why}" for why in shown)])


def run_case(name: str, case: Callable[[Place], Found], place: Place) -> Outcome:
    """Run it; whatever it raises is its failure, and the others go on."""
    start, log = perf_counter(), _Warnings()
    logger = logging.getLogger("dispatch")
    logger.addHandler(log)
    try:
        found = case(place)
    except Skipped as reason:
        return Outcome(name, SKIPPED, perf_counter() - start, [str(reason)])
    except Exception as error:
        return Outcome(name, FAILED, perf_counter() - start, [one_line(error)], log=log.lines)
    finally:
        logger.removeHandler(log)
    why = found.problems + [wrong for each in found.tallies for wrong in each.wrong]
    return Outcome(
        case=name,
        status=FAILED if why else PASSED,
        seconds=perf_counter() - start,
        why=why,
        tokens=sum(each.tokens for each in found.tallies),
        near_ties=sum(each.near_ties for each in found.tallies),
        largest_error=max((each.largest_error for each in found.tallies), default=0.0),
        tolerance=max((each.tolerance for each in found.tallies), default=0.0),
        facts=found.facts,
        log=log.lines,
    )


class _Warnings(logging.Handler):
    """Keeps warnings for the report: cases provoke some of them, and on a terminal they would look like failures."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
