"""`python -m dispatch`."""

from dispatch.cli import main

main(prog_name="python -m dispatch")
