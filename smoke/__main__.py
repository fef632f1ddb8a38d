"""`python -m smoke`: does this node serve right tokens? Small models, every case that the node can run.

Exit status 1 if a case failed, 2 if something was asked for that there is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dispatch.device import current_device
from dispatch.errors import DispatchError
from smoke.cases import CASES
from smoke.outcome import FAILED, PASSED, SKIPPED, Outcome, run_case
from smoke.place import Place
from smoke.threads import one_thread


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m smoke", description=__doc__)
    parser.add_argument("--case", action="append", metavar="NAME", help=f"of {', '.join(CASES)}; all if not given")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--json", action="store_true", help="print a report for a program")
    options = parser.parse_args(arguments)
    wanted = options.case or list(CASES)
    if unknown := [name for name in wanted if name not in CASES]:
        parser.error(f"--case: no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    one_thread()
    try:
        device = current_device(options.device)
    except DispatchError as error:
        parser.error(str(error))
    if not options.json:
        print(device.describe(), flush=True)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="decode-dispatch-smoke-") as folder:
        place = Place(device.kind, Path(folder))
        for name in wanted:
            outcomes.append(run_case(name, CASES[name], place))
            if not options.json:
                print(outcomes[-1].line(), flush=True)
    if options.json:
        print(json.dumps({"device": device.to_json(), "cases": [asdict(each) for each in outcomes]}, indent=1))
    else:
        count = {status: sum(each.status == status for each in outcomes) for status in (PASSED, FAILED, SKIPPED)}
        print(", ".join(f"{number} {status}" for status, number in count.items()))
    return int(any(each.status == FAILED for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
