"""Searches that may take methods for slow links: within a class, where they gain, never unasked."""

import pytest

from drivetrain.config.schema import FarConfig, LinksConfig
from drivetrain.hardware.catalog import load_hardware
from drivetrain.links.chosen import EXACT, LinkMethods
from drivetrain.links.compressor import Honesty
from drivetrain.paper.transformer import GptShape
from drivetrain.planner.approximations import permitted_methods
from drivetrain.planner.auto import _predicted
from drivetrain.planner.predict import Predictor, Task
from drivetrain.planner.run_file import run_settings
from drivetrain.planner.search import search
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import Run
from drivetrain.traffic import Traffic

SHAPE = GptShape(layers=2, hidden=1024, heads=16, seq=128, vocab=512)


def task_over(gigabytes_per_second: float) -> Task:
    hardware = load_hardware("a100-80gb")
    between = hardware.links.between.model_copy(
        update={"gigabytes_per_second": gigabytes_per_second}
    )
    links = hardware.links.model_copy(update={"between": between})
    return Task(SHAPE, 256, hardware.model_copy(update={"links": links}), 2, 2)


SLOW = task_over(0.0125)


@pytest.fixture(scope="module")
def found():
    return {allow: search(SLOW, "bf16", allow) for allow in Honesty}


@pytest.mark.parametrize(
    ("allow", "first"),
    [
        (Honesty.EXACT, Honesty.EXACT),
        (Honesty.THEORY, Honesty.THEORY),
        (Honesty.EMPIRICAL, Honesty.THEORY),
    ],
)
def test_a_search_over_a_slow_link_stays_within_its_class(found, allow, first):
    classes = {each.planned.honesty for each in found[allow].best}
    assert found[allow].best[0].planned.honesty is first
    assert all(each.within(allow) for each in classes)


def test_a_class_further_gains_time_and_the_exact_layouts_stay_in_the_list(found):
    exact, theory = (found[allow].best for allow in (Honesty.EXACT, Honesty.THEORY))
    assert 2 * theory[0].step_seconds < exact[0].step_seconds
    assert {each.layout for each in exact} <= {each.layout for each in theory}


def test_rounding_takes_no_method_of_another_class(found):
    methods = {each.planned.links for each in found[Honesty.ROUNDING].best}
    assert methods <= {EXACT, "bf16"}


def test_a_quick_link_needs_no_method():
    """Fewer bytes gain less than 3% a class, by which an approximate layout must be quicker."""
    best = search(task_over(200.0), "bf16", Honesty.EMPIRICAL).best
    assert best[0].planned.honesty is Honesty.EXACT


def test_one_host_has_nothing_approximate():
    task = Task(SHAPE, 256, SLOW.hardware, 1, 4)
    best = search(task, "bf16", Honesty.EMPIRICAL).best
    assert {each.planned.links for each in best} == {EXACT}


def test_the_first_layout_is_written_with_its_method(found):
    first = found[Honesty.THEORY].best[0]
    name = first.planned.links
    assert name != EXACT
    assert f"links={name}" in first.layout
    assert first.to_json()["honesty"] == "theory"
    settings = run_settings(first.planned, first.micro_batches)
    assert settings["links"]["far"]["gradients"] == name


@pytest.mark.parametrize(
    ("far", "allow", "expected"),
    [
        ("auto", "exact", set()),
        ("auto", "rounding", {"bf16"}),
        ("exact", "theory", set()),
    ],
)
def test_a_run_permits_methods_with_auto_alone(far, allow, expected):
    links = LinkMethods.configured(LinksConfig(far=FarConfig(gradients=far), allow=allow))
    assert set(permitted_methods(links)) == expected


@pytest.mark.parametrize(
    ("far", "allow", "expected"),
    [
        ("auto", "rounding", {EXACT, "bf16"}),
        ("auto", "exact", {EXACT}),
        ("int8", "exact", {"int8"}),
        ("exact", "theory", {EXACT}),
    ],
)
def test_the_strategy_auto_weighs_what_links_permit(far, allow, expected):
    config = LinksConfig(far=FarConfig(gradients=far), allow=allow)
    world = World(size=4, local_size=2, hosts=("a", "a", "b", "b"))
    run = Run(
        world=world,
        mesh=Mesh.plan({"dp": 4}, world),
        precision=Precision.of("bf16"),
        accumulation=1,
        traffic=Traffic(),
        links=LinkMethods.configured(config),
    )
    found = list(_predicted(Predictor(SLOW), run, 4, ("none",)))
    assert {each.planned.links for each in found} == expected
