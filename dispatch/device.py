"""DeviceFingerprint: what of a machine may change which kernel is fastest."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dispatch.errors import MeasureError


@dataclass(frozen=True, slots=True)
class DeviceFingerprint:
    """A device as plain data, so that eligibility and keys can be tested anywhere.

    kind: "cuda" or "cpu". capability: (major, minor) of a CUDA device, (0, 0) otherwise. units: streaming
    multiprocessors, or the threads that torch computes with. driver, cuda: versions, "" on a CPU.
    """

    kind: str
    name: str
    capability: tuple[int, int]
    units: int
    driver: str
    cuda: str
    torch: str

    @property
    def sm(self) -> str:
        """The capability as people write it: SM90."""
        return f"SM{self.capability[0]}{self.capability[1]}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "capability": list(self.capability)}

    def describe(self) -> str:
        """One line for tables and logs."""
        if self.kind == "cpu":
            return f"{self.name}, {self.units} threads, torch {self.torch}"
        return f"{self.name} ({self.sm}, {self.units} SMs), driver {self.driver}, CUDA {self.cuda}, torch {self.torch}"


def current_device(kind: str | None = None) -> DeviceFingerprint:
    """The device that torch would use here: CUDA if there is one. Raises MeasureError for a kind that is absent."""
    import torch

    if kind is None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return DeviceFingerprint("cpu", _cpu_name(), (0, 0), torch.get_num_threads(), "", "", str(torch.__version__))
    if kind != "cuda":
        raise MeasureError(f"device {kind!r}: must be one of cuda, cpu")
    if not torch.cuda.is_available():
        raise MeasureError("device cuda: torch sees no CUDA device here")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return DeviceFingerprint(
        kind="cuda",
        name=properties.name,
        capability=(properties.major, properties.minor),
        units=properties.multi_processor_count,
        driver=_driver_version(),
        cuda=torch.version.cuda or "",
        torch=str(torch.__version__),
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    return next((word for word in text.split() if word[0].isdigit() and word.count(".") >= 1), "")
