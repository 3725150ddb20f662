from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gpu_agent.demo.report import Pressure, Report, Stage

STAGE = Stage(
    name="warm",
    prompt_tokens=2048,
    tokens_reused=2016,
    ttft_s=0.5,
    stored_blocks=1,
    is_identical=True,
    max_abs_kv_error=0.0,
    compared_blocks=126,
    seconds=10.0,
)
REPORT = Report(
    model="m",
    document="d",
    document_tokens=2020,
    tokens_per_block=16,
    cold=dataclasses.replace(STAGE, name="cold", ttft_s=5.0, max_abs_kv_error=None, compared_blocks=0),
    warm=STAGE,
    pressured=dataclasses.replace(STAGE, name="pressure"),
    after_kill=dataclasses.replace(STAGE, name="after kill -9"),
    pressure=Pressure(
        sequence_bytes=100,
        vram_cap_bytes=40,
        peak_vram_bytes=40,
        evicted_blocks=90,
        eviction_batches=9,
        reloaded_blocks=80,
    ),
    killed_at_blocks=10,
    killed_block_count=63,
)


def test_a_good_run_breaks_no_promise() -> None:
    assert REPORT.broken_promises() == []


def with_stage(name: str, **changes: Any) -> Report:
    return dataclasses.replace(REPORT, **{name: dataclasses.replace(getattr(REPORT, name), **changes)})


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (with_stage("cold", is_identical=False), "cold: the answer differs"),
        (with_stage("pressured", is_identical=False), "pressure: the answer differs"),
        (with_stage("after_kill", max_abs_kv_error=1e-7), "differ from those computed by up to 1e-07"),
        (with_stage("after_kill", compared_blocks=0), "after kill -9: no restored block"),
        (with_stage("warm", ttft_s=1.3), "warm/cold is 0.26"),
        (with_stage("warm", tokens_reused=1900), "1900 of 2016 document tokens"),
        (with_stage("pressure", peak_vram_bytes=41), "the pool grew to 41 bytes"),
        (with_stage("pressure", vram_cap_bytes=100), "holds the whole sequence"),
        (with_stage("pressure", reloaded_blocks=0), "0 loaded back"),
        (dataclasses.replace(REPORT, killed_at_blocks=63), "not in mid-offload"),
    ],
)
def test_each_broken_promise_is_named(report: Report, sentence: str) -> None:
    (broken,) = report.broken_promises()
    assert sentence in broken


def test_the_ratio_is_not_judged_on_short_documents() -> None:
    report = dataclasses.replace(with_stage("warm", ttft_s=4.0), document_tokens=1000)
    assert report.broken_promises() == []


def test_the_ratio_is_not_judged_on_models_that_compute_in_no_time() -> None:
    report = dataclasses.replace(
        REPORT,
        cold=dataclasses.replace(REPORT.cold, ttft_s=0.05),
        warm=dataclasses.replace(REPORT.warm, ttft_s=0.04),
    )
    assert report.broken_promises() == []


def test_json_has_every_promised_field() -> None:
    promised = {
        *("model", "prompt_tokens", "cold_ttft_s", "warm_ttft_s", "ttft_ratio", "tokens_reused", "identical_output"),
        *("max_abs_kv_error", "evicted_blocks", "reloaded_blocks", "peak_vram_bytes", "vram_cap_bytes"),
    }
    assert promised <= REPORT.to_json().keys()
    assert REPORT.to_json()["ttft_ratio"] == 0.1
