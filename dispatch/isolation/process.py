"""The parent's end of a child process: start it, read what it says, see how it ends, and leave nothing of it behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any

from dispatch.errors import MeasureError
from dispatch.isolation.task import Task

EXIT_S = 2.0  # that a process takes to go, once its pipe is closed
KILL_S = 30.0  # that the driver takes to tear down a context on which a kernel still runs
LOOK_S = 0.01
# The parent's own search path, before anything is imported: nothing in the current folder gets in between.
PROGRAM = "import sys; sys.path[:] = {path!r}; from dispatch.isolation.child import main; main()"


class Child:
    """A process that works on a task, in a session of its own. Its output goes to `log`. Raises MeasureError."""

    def __init__(self, task: Task, log: IO[bytes]) -> None:
        path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
        self._pipe, writing = os.pipe()
        self._unread, self.closed = b"", False
        program = ["-u", "-X", "faulthandler", "-c", PROGRAM.format(path=path), str(writing)]
        try:
            with tempfile.TemporaryFile() as question:
                question.write(task.to_bytes())
                question.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, *program],
                    stdin=question,
                    stdout=log,
                    stderr=log,
                    pass_fds=(writing,),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(self._pipe)
            raise MeasureError(f"no child process can be started: {error}") from None
        finally:
            os.close(writing)

    def next(self, seconds: float) -> list[Any] | None:
        """What it says next; None where it says nothing for so long, or (`closed`) nothing any more."""
        end = monotonic() + seconds
        while b"\n" not in self._unread:
            poll = select.poll()
            poll.register(self._pipe, select.POLLIN)
            if not poll.poll(max(0.0, end - monotonic()) * 1e3):
                return None
            more = os.read(self._pipe, 1 << 16)
            if not more:
                self.closed = True
                return None
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        message: list[Any] = json.loads(line)
        return message

    def compiles(self) -> bool:
        """Whether another process runs in its session: compilers do."""
        return any(pid != self._process.pid for pid in self._session())

    def how_it_ended(self) -> str:
        """Of a process that has closed its pipe."""
        end = monotonic() + EXIT_S
        with suppress(ChildProcessError):  # the program that we run in has taken its status
            while monotonic() < end:  # not collected here, so that its group keeps its number until it is killed
                if ended := os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    if ended.si_code == os.CLD_EXITED:
                        return f"ended its process with status {ended.si_status}"
                    return f"killed by {signal.Signals(ended.si_status).name}"
                sleep(LOOK_S)
            return "closed the pipe on which it reports"
        return "ended its process"

    def kill(self) -> None:
        """It and all that it started. Raises MeasureError if that cannot be killed: it may still be on the device."""
        os.close(self._pipe)
        end = monotonic() + KILL_S
        while members := self._session():  # not its process group: ninja gives each compiler one of its own
            for pid in members:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if monotonic() > end:
                raise MeasureError(f"the child process {self._process.pid} does not end when it is killed")
            sleep(LOOK_S)
        self._process.wait()

    def _session(self) -> list[int]:
        """The processes of its session that run."""
        running = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            try:
                state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:  # it has ended meanwhile
                continue
            if state not in "ZX" and int(session) == self._process.pid:
                running.append(pid)
        return running
