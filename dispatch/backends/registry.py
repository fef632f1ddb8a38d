"""The registry: backends by name, each imported when it is first asked for, so that a missing library costs nothing."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from operator import attrgetter

from dispatch.backends.base import Backend, Support, refuse
from dispatch.candidate import is_backend_name
from dispatch.device import DeviceFingerprint
from dispatch.errors import RegistryError, one_line
from dispatch.spec import AttentionSpec

_log = logging.getLogger(__name__)

ENTRY_POINTS = "dispatch.backends"
# In priority order on SM90: the first eligible one is the default of an engine that names none.
BUILT_IN = {
    "fa3": "dispatch.backends.fa3:Fa3",
    "flashinfer_fa2_tc": "dispatch.backends.flashinfer_fa2:FlashInferFa2TensorCores",
    "flashinfer_xqa": "dispatch.backends.flashinfer_xqa:FlashInferXqa",
    "flashinfer_cudnn": "dispatch.backends.flashinfer_cudnn:FlashInferCudnn",
    "flashinfer_fa2": "dispatch.backends.flashinfer_fa2:FlashInferFa2",
    "flashinfer_trtllm_gen": "dispatch.backends.flashinfer_trtllm_gen:FlashInferTrtllmGen",
    "torch_sdpa": "dispatch.backends.torch_sdpa:TorchSdpa",
    "torch_chunked": "dispatch.backends.torch_chunked:TorchChunked",
}

# Plain torch. In a CUDA graph, whose shapes are fixed, these read every row as far as the longest request served.
FALLBACKS = ("torch_sdpa", "torch_chunked")
FIRST = {9: "fa3", 10: "flashinfer_trtllm_gen"}  # by the major compute capability
FIRST_ELSEWHERE = "flashinfer_fa2_tc"


class Registry:
    """Names to backends. A backend whose import fails stays listed, refused with the reason."""

    def __init__(self) -> None:
        self._load: dict[str, Callable[[], type[Backend]]] = {}
        self._loaded: dict[str, Backend | str] = {}

    def register(self, name: str, load: Callable[[], type[Backend]]) -> None:
        """Add a backend. Raises RegistryError for a name that is taken, or that a candidate cannot carry."""
        if not is_backend_name(name):
            raise RegistryError(f"backend {name!r}: a name is a letter, then letters, digits, '_', '.' or '-'")
        if name in self._load:
            raise RegistryError(f"backend {name!r} is registered already")
        self._load[name] = load

    def names(self) -> tuple[str, ...]:
        """All names, in the order of registration; those from outside come last, by name."""
        return tuple(self._load)

    def priority(self, device: DeviceFingerprint) -> tuple[str, ...]:
        """All names as an engine on this device would try them: the architecture's own kernel first."""
        first = FIRST.get(device.capability[0], FIRST_ELSEWHERE)
        return tuple(sorted(self.names(), key=lambda name: name != first))

    def check(self, names: Iterable[str], source: str) -> None:
        """Raises RegistryError, naming `source` and what there is, if one of the names is unknown."""
        for name in names:
            if name not in self._load:
                raise RegistryError(f"{source}: no backend {name!r}; there are {', '.join(self._load)}")

    def get(self, name: str) -> Backend:
        """The backend. Raises RegistryError if it is unknown or cannot be imported."""
        self.check([name], "backend")
        if name not in self._loaded:
            try:
                self._loaded[name] = _checked(self._load[name]()())
            except Exception as error:  # a third party's module: whatever it raises refuses it alone
                self._loaded[name] = f"cannot be imported: {one_line(error)}"
        backend = self._loaded[name]
        if isinstance(backend, str):
            raise RegistryError(f"backend {name!r} {backend}")
        return backend

    def support(self, name: str, spec: AttentionSpec, device: DeviceFingerprint) -> Support:
        """The backend's own answer; a refusal where it cannot be imported, or breaks its word and raises."""
        try:
            backend = self.get(name)
        except RegistryError as error:
            return refuse(str(error))
        try:
            support = backend.support(spec, device)
            if not (isinstance(support, Support) and isinstance(support.reason, str)):
                return refuse(f"support() returned {support!r}"[:120])
            return support
        except Exception as error:  # support() must not raise; a third party's that does loses itself alone
            return refuse(f"support() raised {one_line(error)}")

    def version(self, name: str) -> str:
        """Version of what the backend comes from; "" where it is not there, or cannot be told."""
        try:
            return str(self.get(name).version())
        except Exception:  # no such package; or a third party's own version() that raises
            return ""


def _checked(backend: object) -> Backend:
    """A backend that keeps to the contract as far as can be seen without calling it. Raises TypeError."""
    if not isinstance(backend, Backend):
        raise TypeError(f"{type(backend).__name__} is not a dispatch.Backend")
    for field in ("family", "distribution"):
        if not isinstance(getattr(backend, field, None), str) or not getattr(backend, field):
            raise TypeError(f"{type(backend).__name__}.{field} must be a text")
    return backend


def importer(target: str) -> Callable[[], type[Backend]]:
    """What loads the class that "module:qualified name" means."""

    def load() -> type[Backend]:
        module, _, name = target.partition(":")
        cls: type[Backend] = attrgetter(name)(importlib.import_module(module))
        return cls

    return load


def _fill() -> Registry:
    filled = Registry()
    for name, target in BUILT_IN.items():
        filled.register(name, importer(target))
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda p: p.name):
        try:
            filled.register(point.name, point.load)
        except RegistryError as error:  # an installed plugin must not keep an engine from starting
            _log.warning("entry point %s = %s is left out: %s", point.name, point.value, error)
    return filled


registry = _fill()
