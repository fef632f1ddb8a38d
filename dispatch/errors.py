"""Every exception that this package raises on purpose.

DispatchError
|-- ConfigError     a flag or an environment variable has a value that cannot be read
|-- SpecError       an attention layer that cannot exist, or cannot be described
|-- ModelError      a model's config.json lacks a field, or has one that is not served
|-- TraceError      a trace file that cannot be read
|-- SamplesError    a samples file that cannot be read
|-- PlanFileError   a plan file that cannot be read, or belongs to another machine or model
|-- RegistryError   an unknown or a duplicate backend name
|-- MeasureError    nothing can be measured here; the engine keeps its default
|-- RanksError      a rank of the engine is gone, or is doing something else than the others
`-- PlanError       a broken contract of the C++ table (BackendPlan)

The command line prints the message of each as one line and exits with status 2.
"""

from __future__ import annotations

LONGEST_REASON = 300  # characters


class DispatchError(Exception):
    """Base of the package's exceptions."""


class ConfigError(DispatchError):
    """A flag or an environment variable has a value that cannot be read."""


class SpecError(DispatchError):
    """An attention layer that cannot exist, or cannot be described."""


class ModelError(DispatchError):
    """A model's config.json lacks a field, or has one that is not served."""


class TraceError(DispatchError):
    """A trace file that cannot be read."""


class SamplesError(DispatchError):
    """A samples file that cannot be read."""


class PlanFileError(DispatchError):
    """A plan file that cannot be read, or that belongs to another machine or model."""


class RegistryError(DispatchError):
    """An unknown or a duplicate backend name."""


class MeasureError(DispatchError):
    """Nothing can be measured here; the engine keeps its default."""


class RanksError(DispatchError):
    """A rank of the engine is gone, or does something else than the others; without it the others cannot go on."""


class PlanError(DispatchError):
    """A broken contract of the C++ table; the table is unchanged."""


def one_line(error: BaseException) -> str:
    """An exception of whatever kind as a reason in a table or a log: its type and the first line of its message.

    That line is cut where it is long: a compiler's may be all of its command.
    """
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 3]}..."
