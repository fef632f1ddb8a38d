"""DispatchConfig: what a user may set, by flag or by environment variable."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dispatch.option import Option, above_zero, backend_names, boolean, folder, fraction, one_of

PREFIX = "DYN_DECODE_"
ISOLATIONS = ("process", "none")
OPTIONS = (
    Option(
        name="enabled",
        env="ENABLE_DYNAMIC_DECODE_BACKEND",
        flag="--enable_dynamic_decode_backend",
        parse=boolean,
        allowed="true or false (or 1/0, yes/no, on/off)",
        help="measure decode attention backends at start and use the stably fastest",
    ),
    Option(
        name="threshold",
        env="DYN_DECODE_THRESHOLD",
        flag="--dyn_decode_threshold",
        parse=fraction,
        allowed="a number from 0 up to, not including, 1",
        help="how much faster than the default a backend must be, as a fraction",
    ),
    Option(
        name="cluster_margin",
        env="DYN_DECODE_CLUSTER_MARGIN",
        flag="--dyn_decode_cluster_margin",
        parse=fraction,
        allowed="a number from 0 up to, not including, 1",
        help="backends within this fraction of the fastest count as equal",
    ),
    Option(
        name="exclude",
        env="DYN_DECODE_EXCLUDE",
        flag="--dyn_decode_exclude",
        parse=backend_names,
        allowed="backend names separated by commas",
        help="backends that are never chosen, separated by commas",
    ),
    Option(
        name="time_budget_s",
        env="DYN_DECODE_TIME_BUDGET",
        flag="--dyn_decode_time_budget",
        parse=above_zero,
        allowed="a finite number of seconds above 0",
        help="seconds to measure at start; what is not measured by then keeps the default",
    ),
    Option(
        name="capture_budget_s",
        env="DYN_DECODE_CAPTURE_SECONDS",
        flag="--dyn_decode_capture_seconds",
        parse=above_zero,
        allowed="a finite number of seconds above 0",
        help="seconds to capture the graphs of other backends than the default's",
    ),
    Option(
        name="capture_budget_mib",
        env="DYN_DECODE_CAPTURE_MIB",
        flag="--dyn_decode_capture_mib",
        parse=above_zero,
        allowed="a finite number of MiB above 0",
        help="memory that those graphs may take, MiB",
    ),
    Option(
        name="isolation",
        env="DYN_DECODE_ISOLATION",
        flag="--dyn_decode_isolation",
        parse=one_of(*ISOLATIONS),
        allowed=" or ".join(ISOLATIONS),
        help="process: candidates are tried in a child process before this one runs them; none: they are not",
    ),
    Option(
        name="cache_dir",
        env="DYN_DECODE_CACHE_DIR",
        flag="--dyn_decode_cache_dir",
        parse=folder,
        allowed="the path of a folder",
        help="where plans are stored",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """The settings, checked. Fractions are of the default's time, seconds are wall-clock seconds.

    `cache_dir` None is the platform's cache folder. A field given as text is read as its flag would be.
    Raises ConfigError that names the field's flag, the value and what is allowed.
    """

    enabled: bool = False
    threshold: float = 0.03
    cluster_margin: float = 0.01
    exclude: tuple[str, ...] = ()
    time_budget_s: float = 180.0
    capture_budget_s: float = 60.0
    capture_budget_mib: float = 2048.0
    isolation: str = "process"
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        for option in OPTIONS:
            object.__setattr__(self, option.name, option.read(option.flag, getattr(self, option.name)))

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ, **overrides: Any) -> DispatchConfig:
        """Overrides that are not None, else the environment's values that are not empty, else the defaults.

        Raises ConfigError that names the flag or the variable, the value and what is allowed.
        """
        values = {name: value for name, value in overrides.items() if value is not None}
        for option in OPTIONS:
            text = env.get(option.env, "")
            if option.name not in values and text.strip():
                values[option.name] = option.read(option.env, text)
        return cls(**values)

    @classmethod
    def from_args(cls, namespace: argparse.Namespace, env: Mapping[str, str] = os.environ) -> DispatchConfig:
        """`from_env` with the flags that were given; a namespace without our flags is the environment's."""
        return cls.from_env(env, **{option.name: getattr(namespace, option.dest, None) for option in OPTIONS})

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], DispatchConfig], tuple[dict[str, Any]]]:
        return _rebuild, ({field.name: getattr(self, field.name) for field in fields(self)},)


def _rebuild(state: dict[str, Any]) -> DispatchConfig:
    """From a pickle that another version may have written: with defaults for what it lacks."""
    known = {field.name for field in fields(DispatchConfig)}
    return DispatchConfig(**{name: value for name, value in state.items() if name in known})


def unknown_variables(env: Mapping[str, str] = os.environ) -> list[str]:
    """Names that look like variables of ours and are none: nothing reads them."""
    known = {option.env for option in OPTIONS}
    return sorted(name for name in env if name.startswith(PREFIX) and name not in known)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every flag, with underscores and with dashes; where one is not given, the environment counts."""
    for option in OPTIONS:
        switch: dict[str, Any] = {"nargs": "?", "const": True} if option.parse is boolean else {}
        parser.add_argument(
            option.flag,
            "--" + option.dest.replace("_", "-"),
            dest=option.dest,
            type=option.read_argument,
            metavar=option.name.upper(),
            help=f"{option.help} (environment: {option.env})",
            **switch,
        )
