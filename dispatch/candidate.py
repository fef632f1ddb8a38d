"""Candidate: a backend with a tactic, and the one text form in which the pair travels."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dispatch.errors import DispatchError
from dispatch.plainjson import shown

_KNOB = r"[a-z][a-z0-9_]*=[0-9]{1,18}"  # so many digits always fit into 64 bits
_NAME = r"[A-Za-z][A-Za-z0-9_.-]*"
_TEXT = re.compile(rf"({_NAME})(?:\[({_KNOB}(?:,{_KNOB})*)\])?")


def is_backend_name(name: str) -> bool:
    """Whether a candidate can carry the name."""
    return re.fullmatch(_NAME, name) is not None


@dataclass(frozen=True, slots=True)
class Candidate:
    """`backend` is a registered name; `tactic` is "" or "knob=number,..." (for example "num_splits=4").

    The knob `max_kv` is common to all backends: the candidate was built for at most so many tokens a request
    (a narrower page table), and is never chosen for longer ones.
    """

    backend: str
    tactic: str = ""

    def __str__(self) -> str:
        return f"{self.backend}[{self.tactic}]" if self.tactic else self.backend

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Inverse of str(). Raises DispatchError."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise DispatchError(f"{shown(text)} is not a candidate: backend or backend[knob=number,...]")
        return cls(match[1], match[2] or "")

    @property
    def knobs(self) -> dict[str, int]:
        """The tactic as numbers."""
        pairs = (knob.split("=") for knob in self.tactic.split(",") if knob)
        return {name: int(number) for name, number in pairs}

    @property
    def max_kv(self) -> int | None:
        """Longest request that the tactic allows, in tokens; None: as long as the build allows."""
        return self.knobs.get("max_kv")
