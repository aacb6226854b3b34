"""The choice of methods for slow links: names, honesty, and what is refused before ranks start."""

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.collectives.stretch import ParameterRow, Stretch
from drivetrain.config.schema import FarConfig, LinksConfig
from drivetrain.errors import ConfigError, UnknownPluginError
from drivetrain.links.chosen import LinkMethods
from drivetrain.links.compressor import Honesty
from drivetrain.registry import compressors
from drivetrain.runtime.precision import Precision
from drivetrain.strategy import find_strategy
from drivetrain_launch.cli import run


def chosen(**far: object) -> LinkMethods:
    return LinkMethods.configured(LinksConfig(far=FarConfig(**far)))


def test_by_default_all_is_exact():
    links = chosen()
    assert not links.active
    assert links.honesty is Honesty.EXACT
    assert links.used_for == []


def test_every_method_says_how_honest_it_is():
    classes = {name: compressors().load(name).honesty for name in compressors().names}
    assert classes["bf16"] is Honesty.ROUNDING
    assert {classes[name] for name in ("int8", "int4", "powersgd", "topk")} == {Honesty.THEORY}
    assert Honesty.EXACT not in classes.values()
    both = chosen(gradients="int8", parameters="bf16", warmup_steps=3)
    assert both.honesty is Honesty.THEORY
    said = "between hosts: gradients int8 (theory), parameters bf16 (rounding), after 3 exact steps"
    assert both.describe() == said
    assert Honesty.ROUNDING.within(Honesty.THEORY)
    assert not Honesty.EMPIRICAL.within(Honesty.THEORY)


def test_wrong_choices_are_refused_with_the_right_ones():
    with pytest.raises(UnknownPluginError, match=r"unknown method 'int9'.*bf16, int4, int8"):
        chosen(gradients="int9")
    with pytest.raises(ConfigError, match=r"found \['blok'\]; they have block"):
        chosen(gradients="int8", options={"blok": 3})
    assert chosen(gradients="int8", options={"block": 64}).gradients.config.block == 64


@pytest.mark.parametrize("name", ["plain"])
def test_a_strategy_without_channels_refuses_methods(name):
    kind, options = find_strategy(name)
    kind.check_links(options, chosen(), Precision.of("no"))
    with pytest.raises(ConfigError, match=r"links.far.gradients: exact under Plain.*'int8'"):
        kind.check_links(options, chosen(gradients="int8"), Precision.of("no"))


def test_ddp_takes_one_compression_and_sends_no_parameters():
    kind, options = find_strategy("ddp", find_strategy("ddp")[0].Config(hook="bf16"))
    with pytest.raises(ConfigError, match="found both: int8 and bf16"):
        kind.check_links(options, chosen(gradients="int8"), Precision.of("no"))
    kind, options = find_strategy("ddp")
    with pytest.raises(ConfigError, match="sends no parameters"):
        kind.check_links(options, chosen(parameters="int8"), Precision.of("no"))


def test_zero3_sends_values_and_refuses_a_method_for_updates_alone():
    kind, options = find_strategy("zero3")
    with pytest.raises(ConfigError, match=r"can send values of parameters.*'powersgd'"):
        kind.check_links(options, chosen(parameters="powersgd"), Precision.of("no"))
    kind.check_links(options, chosen(parameters="int8"), Precision.of("no"))
    kind, options = find_strategy("zero1")
    kind.check_links(options, chosen(parameters="powersgd"), Precision.of("no"))


def test_feedback_refuses_a_loss_scale_and_rounding_does_not():
    kind, options = find_strategy("ddp")
    kind.check_links(options, chosen(gradients="bf16"), Precision.of("fp16"))
    with pytest.raises(ConfigError, match="found fp16"):
        kind.check_links(options, chosen(gradients="int8"), Precision.of("fp16"))


def test_one_host_has_nothing_to_approximate_and_says_so_once(capsys):
    config = {"links": {"far": {"gradients": "int8"}}}
    accelerator = Accelerator(config=config, cpu=True)
    for _ in range(2):
        model = torch.nn.Linear(64, 64)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    said = capsys.readouterr().err
    assert said.count("between hosts: gradients int8 (theory), parameters exact; all ranks") == 1
    accelerator.free_memory()


def test_the_dry_run_shows_methods_and_bytes_and_refuses_before_ranks_start(capsys):
    words = ["launch", "--dry-run", "--cpu", "--nproc-per-node", "1", "--nnodes", "2"]
    words += ["--rdzv-endpoint", "h:1", "--set", "links.far.gradients=int8"]
    assert run(words) == 0
    said = capsys.readouterr().out
    assert "between hosts: gradients int8 (theory), parameters exact" in said
    assert "all_to_all over dp.far" in said
    assert run([*words, "--strategy", "plain"]) == ConfigError.exit_code
    assert "sends no gradients" in capsys.readouterr().err


def test_stretches_are_cut_and_joined_in_terms_of_parameters():
    rows = [ParameterRow("a", (4, 5), 0, 0), ParameterRow("b", (3, 7), 1, 20)]
    whole = Stretch.of(43, torch.float32, rows)
    assert [span.columns for span in whole.spans] == [5, 3]
    left, right = whole.cut(0, 13), whole.cut(13, 43)
    (a,) = left.spans
    assert (a.first, a.start, a.stop) == (0, 0, 13)
    rest, b = right.spans
    assert (rest.name, rest.first, rest.start, rest.stop) == ("a", 13, 0, 7)
    assert (b.name, b.first, b.start, b.stop) == ("b", 0, 7, 28)
    again = Stretch.joined([left, right], torch.float32)
    assert (again.numel, again.nbytes) == (43, 172)
    assert [(s.name, s.first, s.start, s.stop) for s in again.spans] == [
        ("a", 0, 0, 13),
        ("a", 13, 13, 20),
        ("b", 0, 20, 41),
    ]


def test_activations_are_exact_or_rounded_and_said_with_their_class():
    links = chosen(gradients="int8", activations="bf16")
    assert links.used_for == ["gradients", "activations"]
    assert links.honesty is Honesty.THEORY
    rounding = chosen(activations="bf16")
    assert rounding.active
    assert not rounding.in_channels
    assert rounding.honesty is Honesty.ROUNDING
    said = "between hosts: gradients exact, parameters exact, activations "
    assert rounding.describe() == f"{said}bf16 (rounding)"
    assert chosen().describe(frozenset({"activations"})) == f"{said}exact"
    assert set(rounding.facts()) ^ set(chosen().facts()) == {
        "links.far.activations: exact", "links.far.activations: bf16"
    }  # fmt: skip
    assert not rounding.with_exact_activations().active


@pytest.mark.parametrize("name", ["plain", "ddp", "zero2", "fsdp", "local"])
def test_strategies_without_stages_refuse_to_round_activations(name):
    kind, options = find_strategy(name)
    with pytest.raises(ConfigError, match=r"sends no activations .* found 'bf16'; leave it out"):
        kind.check_links(options, chosen(activations="bf16"), Precision.of("no"))


def test_the_dry_run_takes_rounded_activations_with_a_pipeline_alone(capsys):
    words = ["launch", "--dry-run", "--cpu", "--nproc-per-node", "1", "--nnodes", "2"]
    words += ["--rdzv-endpoint", "h:1", "--set", "links.far.activations=bf16"]
    assert run([*words, "--strategy", "megatron", "--set", "strategy.pp=2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "activations bf16 (rounding)" in said
    assert "activations over pp between hosts depends on the batch" in said
    assert run([*words, "--strategy", "ddp"]) == ConfigError.exit_code
    assert "sends no activations" in capsys.readouterr().err
    assert run([*words[:-1], "links.far.activations=int8"]) == ConfigError.exit_code
    assert "links.far.activations" in capsys.readouterr().err
