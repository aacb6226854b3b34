"""Searches that may take methods for slow links: within a class, where they gain, never unasked."""

from functools import cache

import pytest

from drivetrain.compression.compressor import Fidelity
from drivetrain.compression.methods import LinkMethods
from drivetrain.config.outline import EXACT
from drivetrain.config.schema import FarConfig, LinksConfig
from drivetrain.errors import ConfigError
from drivetrain.hardware.description import load_hardware
from drivetrain.planner.layout import read_layout, run_settings
from drivetrain.planner.search import Found, Predictor, Task, permitted_methods, search
from drivetrain.simulator.transformer import GptShape

SHAPE = GptShape(layers=2, hidden=1024, heads=16, seq=128, vocab=512)


def task_over(gigabytes_per_second: float) -> Task:
    hardware = load_hardware("a100-80gb")
    rate = {"gigabytes_per_second": gigabytes_per_second}
    between = hardware.links.between.model_copy(update=rate)
    links = hardware.links.model_copy(update={"between": between})
    return Task(SHAPE, 64, hardware.model_copy(update={"links": links}), 2, 2)


SLOW = task_over(0.0125)


@cache
def found(allow: Fidelity) -> Found:
    return search(SLOW, "bf16", allow)


@pytest.mark.exhaustive
def test_a_search_over_a_slow_link_stays_within_its_class():
    for allow, first in (
        (Fidelity.EXACT, Fidelity.EXACT),
        (Fidelity.THEORY, Fidelity.THEORY),
        (Fidelity.EMPIRICAL, Fidelity.THEORY),
    ):
        classes = {each.planned.fidelity for each in found(allow).best}
        assert found(allow).best[0].planned.fidelity is first
        assert all(each.within(allow) for each in classes)


def test_a_quick_link_needs_no_method():
    """Fewer bytes gain less than 3% a class, by which an approximate layout must be quicker."""
    best = search(task_over(200.0), "bf16", Fidelity.EMPIRICAL).best
    assert best[0].planned.fidelity is Fidelity.EXACT


def test_one_host_has_nothing_approximate():
    task = Task(SHAPE, 64, SLOW.hardware, 1, 4)
    best = search(task, "bf16", Fidelity.EMPIRICAL).best
    assert {each.planned.links for each in best} == {EXACT}


def test_the_first_layout_is_written_with_its_method():
    first = found(Fidelity.THEORY).best[0]
    name = first.planned.links
    assert name != EXACT
    assert f"links={name}" in first.layout
    assert first.to_json()["fidelity"] == "theory"
    settings = run_settings(first.planned, first.micro_batches)
    assert settings["links"]["far"]["gradients"] == name


def test_a_run_permits_methods_with_auto_alone():
    cases = (("auto", "exact", set()), ("auto", "rounding", {"bf16"}), ("exact", "theory", set()))
    for far, allow, expected in cases:
        links = LinkMethods.configured(LinksConfig(far=FarConfig(gradients=far), allow=allow))
        assert set(permitted_methods(links)) == expected


def test_texts_that_are_no_layout_are_refused():
    for text, said in (
        ("tp", "expected KEY=VALUE between commas, found 'tp'"),
        ("tp=2,pp=1, tp=4", "found tp twice; keep one"),
        ("depth=2", "unknown key 'depth'; known: .*micro_batch"),
        ("micro_batch=0", "expected micro_batch of 1 or more, found '0'"),
    ):
        with pytest.raises(ConfigError, match=f"--layout: {said}"):
            read_layout(text)


def test_fp8_is_quicker_where_a_description_has_its_peak_and_says_so_where_not():
    """Products of blocks take it, and passes that scale their factors."""
    hardware = load_hardware("a100-80gb")
    rated = hardware.device.model_copy(update={"teraflops": {"bf16": 312, "fp8": 624}})
    shape = GptShape(layers=4, hidden=4096, heads=32, seq=2048, vocab=512)
    plain, quick = (
        Task(shape, 8, hardware.model_copy(update={"device": device}), 1, 8)
        for device in (hardware.device, rated)
    )
    seconds = {}
    for task, precision in ((plain, "bf16"), (plain, "fp8"), (quick, "fp8"), (quick, "bf16")):
        planned = read_layout(f"data_parallel=ddp,precision={precision}")
        found = Predictor(task).predict(planned)
        seconds[task is quick, precision] = found.parts["products"]
    assert seconds[False, "bf16"] == seconds[False, "fp8"] == seconds[True, "bf16"]
    assert 0.5 < seconds[True, "fp8"] / seconds[False, "fp8"] < 0.8
    assert "a100-80gb has no teraflops for fp8" in plain.remark("fp8")
    assert not quick.remark("fp8")
    assert not plain.remark("bf16")
    settings = run_settings(read_layout("data_parallel=fsdp,precision=fp8"), 1)
    assert settings["dtypes"] == {"param": "bf16", "fp8": "tensorwise_gathered"}
    for refused in ("recompute=selective", "tp=2"):
        with pytest.raises(ConfigError, match="precision: fp8: expected"):
            Predictor(plain).predict(read_layout(f"precision=fp8,{refused}"))
