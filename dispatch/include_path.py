"""Where a C++ engine finds our sources."""

from __future__ import annotations

from pathlib import Path

from dispatch.errors import DispatchError

SOURCES = ("backend_plan.h", "backend_plan.cc", "page_size.h")


def get_include() -> str:
    """The folder that holds backend_plan.h, backend_plan.cc and page_size.h, to compile into an engine of your own.

    That is `dispatch/include` of an installed package, or `csrc` of the checkout for an editable or in-place
    build. Raises DispatchError where neither has them.
    """
    package = Path(__file__).resolve().parent
    folders = (package / "include", package.parent / "csrc")
    for folder in folders:
        if all((folder / source).is_file() for source in SOURCES):
            return str(folder)
    raise DispatchError(f"{', '.join(SOURCES)} are in neither {folders[0]} nor {folders[1]}: reinstall decode-dispatch")
