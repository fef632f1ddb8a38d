"""The cases: each serves requests in one way, and says what it found."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from dispatch.engine.prepare import OUTSIDE
from dispatch.engine.runner import DecodeGraphRunner
from smoke.direct import DirectRunner
from smoke.forced import asked, everywhere
from smoke.golden import MODELS, read
from smoke.off import allowed, run_off
from smoke.place import Found, Place, Skipped, compare
from smoke.ranks import run_ranks
from smoke.serve import serve
from smoke.sizes import BUCKETS
from smoke.tolerance import TOLERANCES, tally

MEASURED = "measured"  # the store of the cases that tune: once, for their layers are the same
BOX_TOKENS, LAST_BOX_TOKENS = 36, 128  # the mean of a batch grows past each


def dense(place: Place) -> Found:
    """The dense model by a plan that is measured here."""
    found, decoder = Found(), place.decoder("dense")
    runner = place.runner(decoder, MEASURED)
    compare(found, "measured", "dense", decoder, runner)
    found.require(not runner.choices[0].why, f"no plan: {runner.choices[0].why}")
    return found


def moe(place: Place) -> Found:
    """The mixture of experts, by the same plan."""
    found, decoder = Found(), place.decoder("moe")
    compare(found, "measured", "moe", decoder, place.runner(decoder, MEASURED))
    return found


def two_ranks(place: Place) -> Found:
    """The dense model over two ranks, by a plan that one has and all use; its winner is not the default if possible."""
    if place.kind == "cuda" and torch.cuda.device_count() < 2:
        raise Skipped("needs two GPUs")
    found = Found()
    spec = MODELS["dense"][0].spec(world=2)
    names = list(asked(spec, place.config("none"), place.kind).tactics)
    task = {"golden": "dense", "device": place.kind, "dtype": "bf16", "requests": 4, "steps": 12}
    ranks = run_ranks(2, {**task, "backend": names[min(1, len(names) - 1)], "planned": True})
    found.tallies += [tally("dense", read("dense")[:4], logits) for logits in ranks]
    alike = all(torch.equal(a, b) for a, b in zip(*ranks, strict=True))
    found.require(alike, "the two ranks computed different logits")
    found.facts["backend"] = names[min(1, len(names) - 1)]
    return found


def on_and_off(place: Place) -> Found:
    """With the flag on and with it off: the same within the tolerance."""
    found, both = Found(), []
    for enabled in (True, False):
        decoder = place.decoder("dense")
        runner = place.runner(decoder, MEASURED, enabled)
        both.append(compare(found, "on" if enabled else "off", "dense", decoder, runner).logits)
    apart = max(float((on - off).abs().max()) for on, off in zip(*both, strict=True))
    found.require(apart <= TOLERANCES["dense"], f"on and off differ by {apart:.3g}")
    return found


def padding(place: Place) -> Found:
    """Every batch size up to the largest bucket, so that most are padded; the winner is not the default."""
    found, decoder = Found(), place.decoder("dense")
    other, steps = place.challengers(decoder)[0], 0
    runner = place.planned(decoder, "padding", everywhere(other))
    for live in range(1, BUCKETS[-1] + 1):
        steps += len(compare(found, "padding", "dense", decoder, runner, read("dense")[:live], steps=4).means)
    _require_served(found, runner, other, steps)
    return found


def turnover(place: Place) -> Found:
    """Requests join, finish, and grow from box to box and past the last, while others run."""
    found, decoder = Found(), place.decoder("dense")
    other, default = place.challengers(decoder)[0], place.default(decoder)
    boxes = everywhere(other, up_to=BOX_TOKENS)
    boxes += everywhere(default, above=BOX_TOKENS, up_to=LAST_BOX_TOKENS)
    runner = place.planned(decoder, "turnover", boxes)
    goldens = sorted(read("dense"), key=lambda golden: len(golden.prompt))  # so that the mean grows with time
    joins = [4 * order for order in range(len(goldens))]
    means = compare(found, "turnover", "dense", decoder, runner, goldens, joins).means
    within = sum(tokens <= BOX_TOKENS for tokens in means)
    past = sum(tokens > LAST_BOX_TOKENS for tokens in means)
    grown = all(any(a <= edge < b for a, b in pairwise(means)) for edge in (BOX_TOKENS, LAST_BOX_TOKENS))
    found.require(grown, f"no batch grew past both boxes; the mean of each step: {means}")
    _require_served(found, runner, other, within)
    misses = runner.counts.misses
    found.require({why for _, why in misses} == {OUTSIDE}, f"misses for another reason: {dict(misses)}")
    found.require(
        sum(misses.values()) == past, f"{past} steps were past the last box, and {sum(misses.values())} missed"
    )
    return found


def pages(place: Place) -> Found:
    """Prompts of more than a page."""
    found, decoder = Found(), place.decoder("dense")
    goldens = [golden for golden in read("dense") if len(golden.prompt) > decoder.cache.spec.page_size]
    compare(found, "pages", "dense", decoder, place.runner(decoder, MEASURED), goldens[: BUCKETS[-1]])
    return found


def winners(place: Place) -> Found:
    """Every backend that is not the default, by a plan that names it everywhere."""
    return _every_winner(place, "dense")


def fp8(place: Place) -> Found:
    """The same over an fp8 KV cache, the default included."""
    found, decoder = Found(), place.decoder("dense-fp8")
    compare(found, "default", "dense-fp8", decoder, place.runner(decoder, "off", enabled=False))
    return _every_winner(place, "dense-fp8", found)


def missing_entry(place: Place) -> Found:
    """A plan without an entry for one bucket: the default serves it, and the steps are counted."""
    found, decoder = Found(), place.decoder("dense")
    other, missing = place.challengers(decoder)[0], BUCKETS[-2]
    boxes = everywhere(other, buckets=[b for b in BUCKETS if b != missing])
    runner = place.planned(decoder, "missing", boxes)
    compare(found, "missing", "dense", decoder, runner)
    missed = set(runner.counts.misses)
    found.require(missed == {(missing, OUTSIDE)}, f"bucket {missing} was to be missed; misses: {missed}")
    in_plan = {(bucket, what) for bucket, what in runner.counts.hits if bucket != missing}
    found.require({what for _, what in in_plan} == {other}, f"{other} was to serve the rest: {sorted(in_plan)}")
    return found


def flag_off(place: Place) -> Found:
    """The flag off, in a process of its own: no library but the default's, and its tokens bit for bit."""
    found, result = Found(), place.folder / "off.pt"
    off = run_off("dense", place.kind, result)
    logits: list[torch.Tensor] = torch.load(result, weights_only=True)
    decoder = place.decoder("dense")
    direct = serve(decoder, DirectRunner(decoder, off["default"]), read("dense"), forced=False)
    same = all(torch.equal(a.argmax(1), b.argmax(1)) for a, b in zip(logits, direct, strict=True))
    found.require(same, f"other tokens than with {off['default']} called directly")
    foreign = sorted(set(off["imported"]) - allowed(off["default"]))
    found.require(not foreign, f"imported: {', '.join(foreign)}")
    found.facts.update(off, bit_equal_logits=all(torch.equal(a, b) for a, b in zip(logits, direct, strict=True)))
    return found


def _every_winner(place: Place, name: str, found: Found | None = None) -> Found:
    found = found or Found()
    for winner in place.challengers(place.decoder(name)):
        decoder = place.decoder(name)
        runner = place.planned(decoder, f"{name}-{winner}", everywhere(winner))
        steps = len(compare(found, winner, name, decoder, runner).means)
        _require_served(found, runner, winner, steps)
    return found


def _require_served(found: Found, runner: DecodeGraphRunner, backend: str, steps: int) -> None:
    """The plan had the backend serve exactly so many steps."""
    served = sum(count for (_, what), count in runner.counts.hits.items() if what == backend)
    found.require(served == steps, f"{backend} was to serve {steps} steps, and served {served}")


CASES: dict[str, Callable[[Place], Found]] = {
    "dense": dense,
    "moe": moe,
    "two-ranks": two_ranks,
    "on-and-off": on_and_off,
    "padding": padding,
    "turnover": turnover,
    "pages": pages,
    "winners": winners,
    "missing-entry": missing_entry,
    "flag-off": flag_off,
    "fp8": fp8,
}
