"""Ranks: small values told by every rank of an engine to every other, over a CPU process group.

Messages go from each rank to each, and not through a collective, so that a rank that is missing can be named, and so
that nothing is left running in the background when a wait is given up.
"""

from __future__ import annotations

import json
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from dispatch.errors import RanksError, one_line

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

TAG = 7311  # of these messages: an engine may send others over the same group
FAREWELL_S = 3.0  # how long a rank that gives up waits for the others to hear why


class Ranks:
    """The ranks that run one model's layers together. The leader is rank 0 of the group.

    Every rank makes the same calls in the same order, whatever it has found: what differs is the value that it shares.
    """

    def __init__(self, group: ProcessGroup | None, patience_s: float) -> None:
        """`group`: one for tensors on a CPU, as gloo's; None: this process is the only rank.

        `patience_s`: how long to wait for the others.
        """
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.patience_s, self._group = patience_s, group
        self._others = [rank for rank in range(self.size) if rank != self.rank]

    @property
    def is_leader(self) -> bool:
        """Whether this rank measures and decides."""
        return self.rank == 0

    def share(self, at: str, value: Any, patience_s: float | None = None) -> list[Any]:
        """What every rank has shared, in the order of ranks. It returns when all have come.

        `at`: where the ranks are, the same text on each. `value`: JSON; the only rank gets it back as it is.
        `patience_s`: in place of the usual one. Raises RanksError, naming a rank, where one did not come in time, is
        gone, has given up, or is somewhere else; this rank can then share nothing more.
        """
        if not self._others:
            return [value]
        patience_s = self.patience_s if patience_s is None else patience_s
        end, mine = monotonic() + patience_s, _packed([at, value])
        heads, bodies, sending = {}, {}, {}
        messages: dict[int, Any] = {self.rank: [at, value]}
        rank = self.rank
        try:
            for rank in self._others:
                heads[rank] = self._receive(rank, torch.zeros(1, dtype=torch.int64))
                sending[rank] = self._send(rank, mine)
            for rank in self._others:
                head, work = heads[rank]
                _wait(work, end)
                bodies[rank] = self._receive(rank, torch.zeros(int(head), dtype=torch.uint8))
            for rank in self._others:
                body, work = bodies[rank]
                _wait(work, end)
                messages[rank] = json.loads(body.numpy().tobytes())
            for rank in self._others:  # that all know where this rank is, before it raises what they may not have seen
                for work in sending[rank]:
                    if isinstance(messages[rank], list):  # one that has given up does not listen
                        _wait(work, end)
        except RuntimeError as error:  # gloo's
            late = f"did not come within {patience_s:g} s"
            raise RanksError(f"rank {rank} {late if monotonic() >= end else 'is gone'}: {at}") from error
        for rank, message in messages.items():
            if isinstance(message, str):
                raise RanksError(f"rank {rank} has given up: {message}")
            if message[0] != at:
                raise RanksError(f"rank {rank} is elsewhere ({message[0]}), and rank {self.rank} here: {at}")
        return [messages[rank][1] for rank in range(self.size)]

    def from_leader(self, at: str, value: Any) -> Any:
        """The leader's value, on every rank. Raises as `share` does."""
        return self.share(at, value if self.is_leader else None)[0]

    def agreed(self, at: str, objection: str) -> str:
        """ "" where no rank objects to what it has found; else the first one's objection. Raises as `share` does."""
        objections = self.share(at, objection)
        if self.size == 1:
            return objection
        return next((f"rank {rank}: {why}" for rank, why in enumerate(objections) if why), "")

    def give_up(self, error: BaseException) -> None:
        """Tell the others why this rank does not go on, where they come to share something. Never raises.

        What `share` has raised, they find out themselves.
        """
        if isinstance(error, RanksError):
            return
        end = monotonic() + FAREWELL_S
        message, sending = _packed(one_line(error)), []
        for rank in self._others:
            try:
                sending += self._send(rank, message)
            except RuntimeError:  # it is gone itself
                continue
        for work in sending:
            try:
                _wait(work, end)
            except RuntimeError:  # it does not listen; it will find the connection closed
                continue

    def _receive(self, rank: int, part: torch.Tensor) -> tuple[torch.Tensor, Work]:
        assert self._group is not None
        return part, self._group.recv([part], rank, TAG)

    def _send(self, rank: int, message: torch.Tensor) -> list[Work]:
        assert self._group is not None
        return [self._group.send([part], rank, TAG) for part in (torch.tensor([len(message)]), message)]


def _packed(message: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)


def _wait(work: Work, end: float) -> None:
    """Raises RuntimeError where it is not done at the end, or the other rank is gone."""
    work.wait(timedelta(seconds=max(end - monotonic(), 0.001)))  # 0 would be the group's own time-out


ALONE = Ranks(None, 0.0)
