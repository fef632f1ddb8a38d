"""The facts that time kernels: raggedness, straw men, ways of timing, the declared maximum, another FA3, fp8."""

from __future__ import annotations

from functools import partial

from dispatch.bench.cuda_timer import CudaTimer
from smoke.facts.impls import CudnnPublicCall, Fa3MetadataEachLayer, FlashInferFa3, xqa_general_kernel
from smoke.facts.stand import BACKENDS, Stand, drawn, layer_of, layer_us, raw
from smoke.facts.table import Found, Row, listed

LONGEST = 65536  # declared in most of the data
CHAIN = 8
FA3_WRAPPER_BYTES = 256 << 20
RAGGED_SIGMA = 1.0  # that of h200_chain_uniform_ragged.json


def raggedness(timer: CudaTimer) -> Found:
    """1: equal lengths against log-normal ones."""
    cells = {name: drawn(sigma, 128, 16384, LONGEST) for name, sigma in (("equal", 0.0), ("ragged", RAGGED_SIGMA))}
    stand = Stand(timer, layer_of(8, 1), LONGEST, cells)
    for name, backend in BACKENDS.items():
        stand.add(name, partial(stand.build, backend))
    measured = stand.measure()
    means = {name: round(float(lengths.mean())) for name, lengths in cells.items()}
    then = {
        "equal": "cudnn 253, fa3 259, xqa 301, fa2_tc 257",
        "ragged": "cudnn 901, fa3 269, xqa 702, fa2_tc 253",
    }
    rows = [
        Row(
            f"1 raggedness: 8/1, batch 128, mean KV {means[cell]}, {cell}, us a layer",
            f"{then[cell]} (h200_chain_uniform_ragged.json, bare chain)",
            listed(layer_us(measured[cell])),
            "with the rest of a layer between; begin_step not in it. " + stand.notes(),
        )
        for cell in cells
    ]
    return Found(tuple(rows), {"mean_kv": means, "us": raw(measured), "failed": stand.failed})


def straw_men(timer: CudaTimer) -> Found:
    """2b: what the strongest form of FA3 and cuDNN saves a layer."""
    spec, rows, found = layer_of(32, 8), [], {}
    for batch, mean_kv in ((1, 2048), (16, 2048)):
        stand = Stand(timer, spec, LONGEST, {"": drawn(0.7, batch, mean_kv, LONGEST)})
        stand.add("fa3", partial(stand.build, "fa3"))
        stand.add("fa3, metadata each layer", lambda stand=stand: Fa3MetadataEachLayer(stand.build("fa3")))
        stand.add("cudnn", partial(stand.build, "flashinfer_cudnn"))
        stand.add("cudnn, public call", partial(_public_cudnn, stand))
        arms = stand.measure()[""]
        us = layer_us(arms)
        where = f"32/8, batch {batch}, mean KV {mean_kv} log-normal 0.7"
        for straw, strong, then in (
            ("fa3, metadata each layer", "fa3", "1.5 to 2 us a layer"),
            ("cudnn, public call", "cudnn", "about 1 us a layer"),
        ):
            if straw in us and strong in us:
                now = f"+{us[straw] - us[strong]:.2f} us a layer ({us[straw]:.2f} against {us[strong]:.2f})"
                note = f"begin_step once a step: {arms[strong].begin_us:.1f} us" if strong == "fa3" else ""
            else:
                now, note = "not measured", stand.notes()
            rows.append(Row(f"2b {straw}: {where}", f"{then} (DESIGN 2.2)", now, note))
        found[where] = {"us": raw({"": arms})[""], "failed": stand.failed}
    return Found(tuple(rows), found)


def _public_cudnn(stand: Stand) -> CudnnPublicCall:
    stand.build("flashinfer_cudnn")  # sizes the family's scratch, which both share
    return CudnnPublicCall(stand.spec, stand.workspaces.get("flashinfer_cudnn"))


def ways_of_timing(timer: CudaTimer) -> Found:
    """4: single launches, a bare chain, a chain with a product between, and one with the rest of a layer."""
    rows, found = [], {}
    for batch, kv, then in (
        (16, 4096, "single xqa 83, cudnn 80, fa3 82; chain 78, 69, 73; filler: xqa +2, others slightly less"),
        (2, 1200, "chain xqa 12.5, cudnn 12.2, fa3 13.5; filler 14.4, 11.6, 13.0"),
    ):
        stand = Stand(timer, layer_of(32, 8), LONGEST, {"": drawn(0.0, batch, kv, LONGEST)}, layers=CHAIN)
        names = ("xqa", "cudnn", "fa3")
        for name in names:
            build = partial(stand.build, BACKENDS[name])
            stand.add_bare(f"{name} single", build, 1)
            stand.add_bare(f"{name} chain", build, CHAIN)
            stand.add_bare(f"{name} product", build, CHAIN, product=True)
            stand.add(f"{name} filler", build)
        measured = stand.measure()
        us = layer_us(measured[""])
        now = [
            f"{way} " + listed({name: us[f"{name} {way}"] for name in names if f"{name} {way}" in us})
            for way in ("single", "chain", "product", "filler")
        ]
        rows.append(
            Row(
                f"4 timing: 32/8, batch {batch}, KV {kv}, us a layer",
                f"{then} (DESIGN 2.4)",
                "; ".join(now),
                stand.notes(),
            )
        )
        found[f"batch {batch}, KV {kv}"] = {"us": raw(measured)[""], "failed": stand.failed}
    return Found(tuple(rows), found)


def declared_maximum(timer: CudaTimer) -> Found:
    """5: the same batch with page tables of three widths."""
    tables = (4096, 16384, 131072)
    cells = {"": drawn(0.0, 1, 4089, tables[0])}
    stand = Stand(timer, layer_of(8, 1), tables[0], cells, layers=CHAIN, tables=tables[1:])
    then = {"xqa": "13, 20, 30", "cudnn": "11, 11.8, 11.9", "fa3": "12.8, 12.6, 12.4"}
    for name in then:
        for tokens in tables:
            stand.add(f"{name}@{tokens}", partial(stand.build, BACKENDS[name], tokens), tokens)
    measured = stand.measure()
    us = layer_us(measured[""])
    rows = []
    for name, figures in then.items():
        now = ", ".join(f"{us[key]:.1f}" if (key := f"{name}@{tokens}") in us else "-" for tokens in tables)
        fact = f"5 declared maximum: 8/1, batch 1, KV 4089, {name}, table for {', '.join(map(str, tables))}"
        rows.append(
            Row(
                fact,
                f"{figures} (h200_declared_max.json, bare chain)",
                now,
                "with the rest of a layer between. " + stand.notes(),
            )
        )
    return Found(tuple(rows), {"us": raw(measured)[""], "failed": stand.failed})


def fa3_of_flashinfer(timer: CudaTimer) -> Found:
    """7: the explicit FA3 of FlashInfer's decode wrapper."""
    stand = Stand(timer, layer_of(32, 8), LONGEST, {"": drawn(0.0, 1, 65536, LONGEST)})
    stand.add("xqa", partial(stand.build, "flashinfer_xqa"))
    stand.add("fa3", partial(stand.build, "fa3"))
    scratch = stand.scratch("flashinfer_fa3", FA3_WRAPPER_BYTES)
    stand.add("FlashInfer's fa3 wrapper", lambda: FlashInferFa3(stand.spec, stand.batch, LONGEST, scratch))
    measured = stand.measure()
    row = Row(
        "7 FlashInfer's fa3 wrapper: 32/8, batch 1, KV 65536, us a layer",
        "wrapper 870, xqa 84 (DESIGN 2.7)",
        listed(layer_us(measured[""])),
        stand.notes(),
    )
    return Found((row,), {"us": raw(measured)[""], "failed": stand.failed})


def fp8(timer: CudaTimer) -> Found:
    """3, directly: fp8 pages, not gated; XQA also through its general kernel."""
    spec, longest, rows, found = layer_of(32, 8, "fp8_e4m3", 64), 131072, [], {}
    for batch in (1, 8, 32, 128):
        cells = {
            f"{mean_kv} {name}": drawn(sigma, batch, mean_kv, longest)
            for mean_kv in (2048, 8192)
            for name, sigma in (("equal", 0.0), ("log-normal 0.7", 0.7))
            if batch > 1 or sigma == 0
        }
        stand = Stand(timer, spec, longest, cells)
        stand.add("fa3", partial(stand.build, "fa3"))
        stand.add("xqa", partial(stand.build, "flashinfer_xqa"))
        with xqa_general_kernel():
            stand.add("xqa general", partial(stand.build, "flashinfer_xqa", scratch_of="flashinfer_xqa_general"))
        stand.add("fa2_tc", partial(stand.build, "flashinfer_fa2_tc"))
        measured = stand.measure()
        differs = stand.differences("fa2_tc")
        for cell, arms in measured.items():
            us = layer_us(arms)
            best = min(us, key=us.__getitem__, default="")
            note = f"fa3 / best: {us['fa3'] / us[best]:.2f} ({best}). " if "fa3" in us else ""
            rows.append(
                Row(
                    f"3 fp8, NOT GATED: 32/8, page 64, batch {batch}, mean KV {cell}, us a layer",
                    _FP8_THEN.get((batch, cell.split()[0]), ""),
                    listed(us),
                    note + stand.notes(),
                )
            )
        rows.append(Row(f"3 fp8, batch {batch}: difference to fa2_tc's output, rms", "", listed(differs, 3)))
        found[f"batch {batch}"] = {"us": raw(measured), "differs": differs, "failed": stand.failed}
    return Found(tuple(rows), found)


_FP8_THEN = {
    (batch, "2048"): f"best over fa3, on the traces: {ratio} (h200_traces_fp8.json)"
    for batch, ratio in ((1, "1.58, xqa"), (8, "1.05"), (32, "1.01"), (128, "1.19"))
}
