"""Importing what backends need while a child process is waited for: some libraries take seconds."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch

from dispatch.backends import Registry
from dispatch.candidate import Candidate


class Ahead:
    """One library after the other, on a thread. At the end of the block all are there.

    `device`: the index of the CUDA device that this process uses; None: it uses none.
    """

    def __init__(self, registry: Registry, device: int | None) -> None:
        self.registry, self.device = registry, device
        self._begun: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "import")

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()

    def built(self, candidate: str) -> None:
        """A child has built this candidate, so its backend's library can be imported, and will be needed here."""
        library = self.registry.get(Candidate.parse(candidate).backend).library
        if library and library not in self._begun:
            self._begun.add(library)
            self._thread.submit(self._import, library)

    def _import(self, library: str) -> None:
        """Whatever it raises is forgotten: `build` will raise it again, where it costs the candidate alone."""
        if self.device is not None:
            torch.cuda.set_device(self.device)  # a thread has one of its own, and the library may ask for it
        importlib.import_module(library)
