"""Backends for a child process to import, beside those of dispatch.bench.faulty."""

from __future__ import annotations

import os
import subprocess

from dispatch.bench.faulty import Faulty, SleepsInBuild


class LeavesCompilersBehind(SleepsInBuild):
    """Starts a program in a process group of its own, as ninja does, and waits for it for ever."""

    def at_build(self, device):
        subprocess.Popen(["sleep", os.environ["RUDE_SLEEP"]], preexec_fn=os.setpgrp).wait()


class OnlyLargeFails(Faulty):
    """Serves small batches."""

    def before(self, out):
        if len(out) > 1:
            raise ValueError("one row at most")


class CrashesInLarge(Faulty):
    """Ends the process, for batches above one row."""

    def before(self, out):
        if len(out) > 1:
            os._exit(0)


class NeverImported(Faulty):
    """A class that its module does not hold under the name it was made with."""


NeverImported.__qualname__ = "Elsewhere"
