"""An engine with the flag off, in a process of its own: what it says, and which kernel libraries it has imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from dispatch.config import DispatchConfig
from smoke.engine import make_decoder, make_runner
from smoke.golden import read
from smoke.serve import serve
from smoke.threads import one_thread

LIBRARIES = ("flashinfer", "flash_attn_interface", "cudnn")
# What each default may import; plain torch nothing.
ALLOWED = {"fa3": {"flash_attn_interface"}, "flashinfer_cudnn": {"flashinfer", "cudnn"}}
PATIENCE_S = 300.0  # a kernel may be compiled
ROOT = Path(__file__).parents[1]


def allowed(backend: str) -> set[str]:
    """Kernel libraries that this backend, as the default, may import."""
    return ALLOWED.get(backend, {"flashinfer"} if backend.startswith("flashinfer") else set())


def run_off(name: str, kind: str, result: Path) -> dict[str, Any]:
    """{"default", "imported"} of an engine that serves a golden's requests, each fed its own tokens.

    The logits go to `result`. Raises RuntimeError with the last line of a process that failed.
    """
    command = [sys.executable, "-m", "smoke.off", name, kind, str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {''.join(done.stderr.strip().splitlines()[-1:])}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _main(name: str, kind: str, result: str) -> None:
    one_thread()
    decoder = make_decoder(name, torch.device(kind))
    runner = make_runner(decoder, DispatchConfig(enabled=False))
    torch.save(serve(decoder, runner, read(name), forced=False), result)
    imported = sorted(library for library in LIBRARIES if library in sys.modules)
    print(json.dumps({"default": runner.report.defaults, "imported": imported}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
