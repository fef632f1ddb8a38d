"""How long a candidate may take in the child, and how much memory the child may take."""

from __future__ import annotations

from dataclasses import dataclass

CHILD_BYTES = 3 << 29  # 1.5 GiB, of the memory that an engine leaves free beside its KV cache
OUTSIDE_TORCH_BYTES = 700 << 20  # of those, on a GPU: the CUDA context and the kernels' modules

COMPILING = ("build", "capture")  # the stages in which compilers may run


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without a sign of life, after which what was begun last counts as hung.

    start_s: until torch is imported and the device is ready; it may lie on a network's file system. import_s: a
    backend's module. first_s: building, and the first run, without compilers (some libraries compile within Python, or
    wait for another process that compiles the same). compile_s: what compilers may take, beside that. replay_s: one
    run of what was built. own_s: what is done between, the gate's reference for the most part.
    """

    start_s: float = 120.0
    import_s: float = 120.0
    first_s: float = 120.0
    compile_s: float = 300.0
    replay_s: float = 20.0
    own_s: float = 60.0

    def of(self, stage: str) -> float:
        """The limit of a stage; "" is what is done between stages."""
        limits = {"start": self.start_s, "import": self.import_s, "replay": self.replay_s}
        return limits.get(stage, self.first_s if stage in COMPILING else self.own_s)
