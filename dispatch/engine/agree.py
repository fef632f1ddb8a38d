"""What the ranks of an engine must have in common before one of them decides for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dispatch.backends import Registry
from dispatch.device import DeviceFingerprint
from dispatch.eligible import Eligible
from dispatch.engine.ranks import Ranks
from dispatch.errors import one_line
from dispatch.key import differing, digest
from dispatch.request import TuneRequest

SHOWN_DIFFERENCES = 5  # of each rank
OF_A_GROUP = ("spec", "default")  # in a key; the rest is the same for all layer groups


def facts_of(
    requests: Sequence[TuneRequest],
    able: Sequence[Eligible],
    device: DeviceFingerprint,
    registry: Registry,
    refusal: str,
) -> dict[str, Any]:
    """This rank as JSON: the keys of its layer groups, and who may serve them; or why it does not switch at all."""
    if refusal:
        return {"refusal": refusal}
    try:
        keys = [one.key(device, registry, own.default) for one, own in zip(requests, able, strict=True)]
    except Exception as error:  # a plan cannot be had here; the others are told
        return {"refusal": one_line(error)}
    groups = {name: {str(i): key[name] for i, key in enumerate(keys)} for name in OF_A_GROUP}
    eligible = {str(i): list(own.tactics) for i, own in enumerate(able)}
    return {"refusal": "", **keys[0], **groups, "eligible": eligible}


def difference(ranks: Ranks, mine: Mapping[str, Any]) -> str:
    """Which ranks differ from the leader, and in what; "" where all are alike. The same text on every rank.

    `mine`: this rank's facts. Raises RanksError as `Ranks.share` does.
    """
    leader, *others = ranks.share("what each rank is", mine)
    found = []
    for rank, facts in enumerate(others, 1):
        if digest(facts) != digest(leader):
            fields = differing(facts, leader)
            fields = [field for field in fields if field[0] == "refusal"] or fields
            shown = [f"{name} is {theirs!r}, and {ours!r} on rank 0" for name, theirs, ours in fields]
            more = len(shown) - SHOWN_DIFFERENCES
            shown[SHOWN_DIFFERENCES:] = [f"and {more} more"] if more > 0 else []
            found.append(f"on rank {rank} {'; '.join(shown)}")
    return f"the ranks differ: {'; '.join(found)}" if found else ""
