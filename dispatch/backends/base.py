"""The contract of a backend: say what you serve, then build it. A backend is one short file and a registration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import ClassVar

import torch

from dispatch.device import DeviceFingerprint
from dispatch.spec import DTYPE_BYTES, AttentionSpec
from dispatch.step import StepInputs

KVCache = tuple[torch.Tensor, torch.Tensor]
LOAD_BYTES = 16


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a backend serves a layer on a device, and if not, why, for a person to read."""

    ok: bool
    reason: str = ""


SUPPORTED = Support(True)


def refuse(reason: str) -> Support:
    """A refusal with its reason."""
    return Support(False, reason)


def not_installed(module: str, distribution: str) -> str:
    """The reason for a refusal where a module is absent, "" where it is there; found without importing it."""
    return "" if find_spec(module) else f"not installed: pip install {distribution}"


def unaligned_strides(spec: AttentionSpec) -> str:
    """The reason for a refusal where rows of the KV cache do not begin at multiples of 16 bytes, as a load and TMA
    want them; "" where they do."""
    size = DTYPE_BYTES[spec.kv_dtype]
    if spec.kv_strides is None or not any(stride * size % LOAD_BYTES for stride in spec.kv_strides):
        return ""
    return f"KV strides {spec.kv_strides}: must be multiples of {LOAD_BYTES} bytes"


class DecodeImpl(ABC):
    """One candidate built for a batch size and a longest request. Holds its buffers while a graph may use them.

    A step is: `plan` on the host before every replay where `needs_plan`; `begin_step` once, captured before the
    first layer; `forward` for each layer, captured.
    """

    needs_plan: bool = False
    plan_waits: bool = True
    """Whether `plan` may wait for more of the device's work than its own last call has queued. It is timed: where it
    may, the device is idle before."""

    def plan(self, inputs: StepInputs) -> None:  # noqa: B027 - most kernels have nothing to plan
        """Host work that depends on the lengths. Never moves a buffer that a graph has captured."""

    @abstractmethod
    def begin_step(self, inputs: StepInputs) -> None:
        """Device work done once a step; remembers where the lengths and the pages are."""

    @abstractmethod
    def forward(self, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        """One layer's attention of one new token a request.

        q: [batch, num_qo_heads, head_dim_qk] in the activation dtype. kv_cache: (K pages, V pages) as
        AttentionSpec lays them out. out: [batch, num_qo_heads, head_dim_vo] in the activation dtype; every live
        row is written. sinks: float32 [num_qo_heads], where spec.has_sinks. Launches only what a CUDA graph can
        capture, and does not wait for the device.
        """


class Backend(ABC):
    """A kernel family, registered under its one explicit name.

    `needs_exact_lengths`: whether an upper bound in StepInputs.lengths_host would not do. `family`: backends that may
    share a scratch. `distribution`: the installed package whose version is part of a stored plan's key. `library`: the
    module that `build` imports, if it takes long: it is imported while a child process tries the backend.
    """

    needs_exact_lengths: ClassVar[bool] = False
    family: ClassVar[str]
    distribution: ClassVar[str]
    library: ClassVar[str] = ""

    def version(self) -> str:
        """Of all that its numbers and its speed come from: part of a stored plan's key."""
        return version(self.distribution)

    @abstractmethod
    def support(self, spec: AttentionSpec, device: DeviceFingerprint) -> Support:
        """Static: launches nothing, allocates nothing, never raises. What it does not know, it refuses."""

    def tactics(self, spec: AttentionSpec, device: DeviceFingerprint, batch_size: int, max_kv: int) -> tuple[str, ...]:
        """Values of the backend's own knobs worth measuring, as Candidate.tactic: "" first, then others, each once.

        A tactic "max_kv=..." is for shorter requests than the `max_kv` that is served.
        """
        return ("",)

    def workspace_bytes(self, spec: AttentionSpec, batch_size: int, max_kv: int) -> int:
        """Scratch that `build` needs for these sizes."""
        return 0

    @abstractmethod
    def build(
        self,
        spec: AttentionSpec,
        batch_size: int,
        max_kv: int,
        workspace: torch.Tensor,
        tactic: Mapping[str, int],
    ) -> DecodeImpl:
        """Ready to plan and capture for `batch_size` rows of at most `max_kv` tokens.

        `workspace` is the family's scratch, uint8, on the device to run on; at least `workspace_bytes` of it.
        """
