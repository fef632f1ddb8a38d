"""A small engine: requests join, decode together, grow page by page, and finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from smoke.golden import Golden
from smoke.model import Decoder


class Runner(Protocol):
    """What serves a decode step, as dispatch.engine.runner.DecodeGraphRunner does."""

    def run(self, lengths_host: torch.Tensor, block_tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits of the live rows."""
        ...


@dataclass(slots=True)
class _Request:
    golden: Golden
    order: int
    fed: list[int]
    pages: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def serve(
    decoder: Decoder,
    runner: Runner,
    goldens: Sequence[Golden],
    joins: Sequence[int] | None = None,
    steps: int | None = None,
    forced: bool = True,
) -> list[torch.Tensor]:
    """Each request's logits, float32 [tokens, vocab] on the host, the first of them from the prefill.

    `joins`: the step at which each request arrives; None: all at once. It waits while the batch is full. `steps`: stop
    a request after so many tokens. `forced`: feed the golden tokens, so that after a near tie went the other way the
    context is still the one that the reference has seen; otherwise each request's own best.
    """
    waiting = [_Request(golden, order, list(golden.prompt)) for order, golden in enumerate(goldens)]
    arrival = joins or [0] * len(goldens)
    live: list[_Request] = []
    done: list[_Request] = []
    now = 0
    while waiting or live:
        while waiting and arrival[waiting[0].order] <= now and len(live) < len(decoder.tokens):
            live.append(_prefilled(decoder, waiting.pop(0), forced))
        for request in [r for r in live if len(r.logits) == (steps or len(r.golden.tokens))]:
            live.remove(request)  # those behind it move to other rows
            done.append(request)
            decoder.cache.give_back(request.pages)
        if live:
            _step(decoder, runner, live, forced)
        now += 1
    return [torch.stack(request.logits) for request in sorted(done, key=lambda r: r.order)]


def _prefilled(decoder: Decoder, request: _Request, forced: bool) -> _Request:
    decoder.cache.grow(request.pages, len(request.fed))
    _record(request, decoder.prefill(request.fed, request.pages).cpu(), forced)
    return request


def _step(decoder: Decoder, runner: Runner, live: Sequence[_Request], forced: bool) -> None:
    for request in live:
        decoder.cache.grow(request.pages, len(request.fed))
    width = max(len(request.pages) for request in live)
    decoder.tokens[: len(live)].copy_(torch.tensor([request.fed[-1] for request in live]))
    lengths = torch.tensor([len(request.fed) for request in live], dtype=torch.int32)
    logits = runner.run(lengths, [decoder.cache.table([request.pages for request in live], width)]).cpu()
    for request, row in zip(live, logits, strict=True):
        _record(request, row.clone(), forced)


def _record(request: _Request, logits: torch.Tensor, forced: bool) -> None:
    request.fed.append(request.golden.tokens[len(request.logits)] if forced else int(logits.argmax()))
    request.logits.append(logits)
