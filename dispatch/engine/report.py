"""What capturing gave, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dispatch.engine.variants import Variant


def named(variant: Variant) -> str:
    """A variant as text: the candidate of each layer group, once where they are the same."""
    return " + ".join(dict.fromkeys(str(candidate) for candidate in variant))


@dataclass(frozen=True, slots=True)
class VariantReport:
    """One variant of a bucket. `dropped`: why the default serves in its place, "" if it is captured."""

    bucket: int
    variant: str
    is_default: bool
    seconds: float = 0.0
    mib: float = 0.0
    dropped: str = ""


@dataclass
class CaptureReport:
    """`refusal`: why nothing is switched. `why_default`: of each layer group, why it has no plan; "" if it has one."""

    refusal: str
    defaults: str
    why_default: Sequence[str]
    variants: list[VariantReport] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of all captures."""
        return sum(v.seconds for v in self.variants)

    @property
    def mib(self) -> float:
        """Of all captures, as the device's free memory shows it."""
        return sum(v.mib for v in self.variants)

    def lines(self) -> list[str]:
        """For a log."""
        head = f"default {self.defaults}" + (f"; {self.refusal}" if self.refusal else "")
        kept = sum(not v.dropped for v in self.variants)
        lines = [f"{head}: {kept} graphs in {self.seconds:.1f} s, {self.mib:.0f} MiB"]
        for v in self.variants:
            fate = f" is not used: {v.dropped}" if v.dropped else ""
            lines.append(f"bucket {v.bucket}: {v.variant}{fate}, {v.seconds:.2f} s, {v.mib:.0f} MiB")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "refusal": self.refusal,
            "defaults": self.defaults,
            "why_default": list(self.why_default),
            "variants": [
                {
                    "bucket": v.bucket,
                    "variant": v.variant,
                    "is_default": v.is_default,
                    "seconds": round(v.seconds, 4),
                    "mib": round(v.mib, 1),
                    "dropped": v.dropped,
                }
                for v in self.variants
            ],
        }
