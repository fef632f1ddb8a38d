"""The progress of a tuning run, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from dispatch.request import TuneRequest
    from dispatch.tuner import Progress as Advance


@contextmanager
def progress_bar(request: TuneRequest, quiet: bool) -> Iterator[Advance]:
    """A progress bar with an estimate, on standard error; nothing until measuring begins."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} samples"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(request.spec.describe(), total=None, visible=False)

        def advance(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what, visible=True)

        yield advance
