"""The quarantine: the candidates of a key that failed in the child process, so that no later start tries them again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dispatch.atomic import opened, set_aside, write_atomically
from dispatch.candidate import Candidate
from dispatch.decision import Reason
from dispatch.errors import PlanFileError
from dispatch.key import check_key, differences, digest
from dispatch.plainjson import each, field, mapping, parse, text, whole
from dispatch.planfile import candidate_from_json, reason_from_json
from dispatch.readfile import read_file

_log = logging.getLogger(__name__)

FORMAT = 1
SUFFIX = ".quarantine"
QUARANTINED = "quarantined: "  # how the reason in a plan begins


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A candidate, and what it did. `bucket` is 0 where it got as far as none. `since`: ISO 8601, UTC."""

    candidate: str
    bucket: int
    stage: str
    reason: Reason
    why: str
    since: str

    def describe(self) -> str:
        """One line for plans, tables and logs."""
        where = f" at batch {self.bucket}" if self.bucket else ""
        return f"{QUARANTINED}{self.stage}{where}: {self.why}"


class Quarantine:
    """In memory, and in a file where there is one: the plan's, with the suffix .quarantine.

    A file that cannot be read, or is of another key, counts as empty, with one warning; it is set aside. One that
    cannot be written costs the next start another try, and nothing else.
    """

    def __init__(self, plan: Path | None = None, key: Mapping[str, Any] | None = None) -> None:
        """`plan`: where the plan of `key` is stored."""
        self.path = None if plan is None else plan.with_suffix(SUFFIX)
        self.log = None if plan is None else plan.with_suffix(".log")
        self._key = dict(key or {})
        self._held = {q.candidate: q for q in self._read()}

    def __iter__(self) -> Iterator[Quarantined]:
        return iter(self._held.values())

    def get(self, candidate: str) -> Quarantined | None:
        """What keeps a candidate out, if something does: whatever holds for a backend holds for its tactics."""
        return self._held.get(candidate) or self._held.get(Candidate.parse(candidate).backend)

    def refusals(self, default: str) -> dict[str, str]:
        """The candidates that it keeps out, with the reason. The default is none of them: it serves all the same."""
        return {name: held.describe() for name, held in self._held.items() if name != default}

    def add(self, candidate: str, bucket: int, stage: str, reason: Reason, why: str) -> Quarantined:
        """Keep a candidate out from now on."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        added = self._held[candidate] = Quarantined(candidate, bucket, stage, reason, why, now)
        if self.path is not None:
            held = [{**asdict(q), "reason": q.reason.name} for q in self._held.values()]
            body = {"format": FORMAT, "key": self._key, "quarantined": held}
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path, json.dumps({**body, "checksum": digest(body)}, indent=1).encode() + b"\n")
            except OSError as error:
                _log.warning("the quarantine was not stored: %s: %s", self.path, error.strerror)
        return added

    def clear(self) -> tuple[str, ...]:
        """Give every candidate another chance; says which."""
        cleared = tuple(self._held)
        self._held.clear()
        if self.path is not None:
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("the quarantine stays stored: %s: %s", self.path, error.strerror)
        return cleared

    def _read(self) -> tuple[Quarantined, ...]:
        if self.path is None or not os.path.exists(self.path):
            return ()
        seen = opened(self.path)
        if seen is None:
            return ()
        try:
            key, held = read_quarantine(self.path)
            if differing := differences(key, self._key):
                raise PlanFileError(f"{self.path}: {differing[0]}")
        except PlanFileError as error:
            set_aside(self.path, seen, str(error))
            return ()
        finally:
            os.close(seen)
        return held


def read_quarantine(path: Path) -> tuple[dict[str, Any], tuple[Quarantined, ...]]:
    """A file's key, and the candidates in it. Raises PlanFileError, naming the file, for whatever is wrong with it."""
    try:
        body = parse(read_file(path), path, "quarantined", FORMAT, PlanFileError)
        checksum = body.pop("checksum", None)
        if digest(body) != checksum:
            raise ValueError("checksum: the file was changed or damaged")
        return field(body, "key", check_key), field(body, "quarantined", lambda held: each(held, _from_json))
    except OSError as error:
        raise PlanFileError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{path}: {error}") from None


def _from_json(value: Any) -> Quarantined:
    data = mapping(value)
    return Quarantined(
        field(data, "candidate", candidate_from_json),
        field(data, "bucket", whole),
        field(data, "stage", text),
        field(data, "reason", reason_from_json),
        field(data, "why", text),
        field(data, "since", text),
    )
