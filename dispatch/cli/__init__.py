"""The command line: `decode-dispatch`, or `python -m dispatch`."""

from __future__ import annotations

import logging
from typing import Any

import click

from dispatch import __version__
from dispatch.cli.bench import bench
from dispatch.cli.compare import compare
from dispatch.cli.doctor import doctor
from dispatch.cli.explain import explain
from dispatch.cli.select import select
from dispatch.cli.show import show
from dispatch.cli.tune import tune
from dispatch.errors import DispatchError


class _UserError(click.ClickException):
    exit_code = 2


class _OneLineErrors(click.Group):
    """Every error that the package raises on purpose is one line, and exit status 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DispatchError as error:
            raise _UserError(str(error)) from None


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def main() -> None:
    """Measure decode attention kernels here, and pick the stably fastest for each captured batch size."""
    logging.basicConfig(level=logging.WARNING, format="warning: %(message)s")


for command in (tune, show, explain, compare, doctor, select, bench):
    main.add_command(command)
