"""The choice of methods for slow links: names, fidelity, and what is refused before ranks start."""

import pytest
import torch

from drivetrain.collectives.volume import FlatSlice, ParameterRow
from drivetrain.compression import automatic
from drivetrain.compression.communicator import hosts_apart
from drivetrain.compression.compressor import Fidelity
from drivetrain.compression.methods import EncodingTime, LinkFigures, LinkMethods, SlowLink
from drivetrain.config import Layer, read_sets
from drivetrain.config.resolve import resolve
from drivetrain.config.schema import FarConfig, LinksConfig
from drivetrain.cost import TensorSpec
from drivetrain.errors import ConfigError, UnknownPluginError
from drivetrain.registry import compressors, strategies
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import find_strategy
from drivetrain_launch.cli import run


@pytest.fixture(autouse=True)
def quick_encodings(monkeypatch) -> None:
    """Say what encodings take: measured beside other work, none might pay."""
    monkeypatch.setattr(
        "drivetrain.compression.automatic.slowest_times",
        lambda methods, *_: dict.fromkeys(methods, EncodingTime(1e-4, 1e-9)),
    )


def chosen(**far: object) -> LinkMethods:
    return LinkMethods.configured(LinksConfig(far=FarConfig(**far)))


def test_methods_say_how_honest_they_are():
    classes = {name: compressors().load(name).fidelity for name in compressors().names}
    assert classes["bf16"] is Fidelity.ROUNDING
    own = ("int8", "int4", "onebit", "powersgd", "topk")
    assert {classes[name] for name in own} == {Fidelity.THEORY}
    assert Fidelity.EXACT not in classes.values()
    both = chosen(gradients="int8", parameters="bf16", warmup_steps=3)
    assert both.fidelity is Fidelity.THEORY
    said = "between hosts: gradients int8 (theory), parameters bf16 (rounding), after 3 exact steps"
    assert both.describe() == said
    assert Fidelity.ROUNDING.within(Fidelity.THEORY)
    assert not Fidelity.EMPIRICAL.within(Fidelity.THEORY)

    links = chosen(gradients="int8", activations="bf16")
    assert links.used_for == ["gradients", "activations"]
    assert links.fidelity is Fidelity.THEORY
    rounding = chosen(activations="bf16")
    assert rounding.active
    assert not rounding.in_channels
    assert rounding.fidelity is Fidelity.ROUNDING
    said = "between hosts: gradients exact, parameters exact, activations "
    assert rounding.describe() == f"{said}bf16 (rounding)"
    assert chosen().describe(frozenset({"activations"})) == f"{said}exact"
    assert set(rounding.facts()) ^ set(chosen().facts()) == {
        "links.far.activations: exact", "links.far.activations: bf16"
    }  # fmt: skip
    assert not rounding.with_exact_activations().active

    links = LinkMethods.configured(LinksConfig(far=FarConfig(gradients="auto"), allow="rounding"))
    assert not links.active
    assert links.fidelity is Fidelity.EXACT
    said = "between hosts: gradients auto, parameters exact, rounding at most, still to be chosen"
    assert links.describe() == said
    kind, options = find_strategy("plain")
    kind.check_links(options, links, Precision.of("no"))
    with pytest.raises(ConfigError, match=r"found \['blok'\]"):
        chosen(gradients="auto", options={"blok": 3})


def test_wrong_choices_are_refused_with_the_right_ones():
    with pytest.raises(UnknownPluginError, match=r"unknown method 'int9'.*bf16, int4, int8"):
        chosen(gradients="int9")
    with pytest.raises(ConfigError, match=r"found \['blok'\]; they have block"):
        chosen(gradients="int8", options={"blok": 3})
    assert chosen(gradients="int8", options={"block": 64}).gradients.config.block == 64
    with pytest.raises(ConfigError, match=r"options\.block: expected at least 16, found 8"):
        chosen(gradients="int8", options={"block": 8})
    with pytest.raises(ConfigError, match=r"options\.block: .*integer.*found 'many'"):
        chosen(gradients="int8", options={"block": "many"})


def test_strategies_refuse_what_they_do_not_send():
    kind, options = find_strategy("ddp", find_strategy("ddp")[0].Config(hook="bf16"))
    with pytest.raises(ConfigError, match="found both: int8 and bf16"):
        kind.check_links(options, chosen(gradients="int8"), Precision.of("no"))
    kind, options = find_strategy("ddp")
    with pytest.raises(ConfigError, match="sends no parameters"):
        kind.check_links(options, chosen(parameters="int8"), Precision.of("no"))

    kind, options = find_strategy("zero3")
    with pytest.raises(ConfigError, match=r"can send values of parameters.*'powersgd'"):
        kind.check_links(options, chosen(parameters="powersgd"), Precision.of("no"))
    kind.check_links(options, chosen(parameters="int8"), Precision.of("no"))
    kind, options = find_strategy("zero1")
    kind.check_links(options, chosen(parameters="powersgd"), Precision.of("no"))

    kind, options = find_strategy("ddp")
    kind.check_links(options, chosen(gradients="bf16"), Precision.of("fp16"))
    with pytest.raises(ConfigError, match="found fp16"):
        kind.check_links(options, chosen(gradients="int8"), Precision.of("fp16"))
    free = {"rounding": "stochastic", "feedback": False}
    kind.check_links(options, chosen(gradients="int8", options=free), Precision.of("fp16"))
    with pytest.raises(ConfigError, match=r"options.*feedback: true with rounding: nearest"):
        chosen(gradients="int8", options={"feedback": False})
    wide = chosen(gradients="int4", options={"rounding": "stochastic", "block": 512})
    assert wide.describe().startswith("between hosts: gradients int4 (empirical), ")


def test_stretches_are_cut_and_joined_in_terms_of_parameters():
    rows = [ParameterRow("a", (4, 5), 0, 0), ParameterRow("b", (3, 7), 1, 20)]
    whole = FlatSlice.of(43, torch.float32, rows)
    assert [span.columns for span in whole.spans] == [5, 3]
    left, right = whole.cut(0, 13), whole.cut(13, 43)
    (a,) = left.spans
    assert (a.first, a.start, a.stop) == (0, 0, 13)
    rest, b = right.spans
    assert (rest.name, rest.first, rest.start, rest.stop) == ("a", 13, 0, 7)
    assert (b.name, b.first, b.start, b.stop) == ("b", 0, 7, 28)
    (later,) = right.cut(2, 5).spans
    assert (later.first, later.start, later.stop) == (15, 0, 3)
    again = FlatSlice.joined([left, right], torch.float32)
    assert (again.numel, again.nbytes) == (43, 172)
    spans = [(s.name, s.first, s.start, s.stop) for s in again.spans]
    assert spans == [("a", 0, 0, 13), ("a", 13, 13, 20), ("b", 0, 20, 41)]


def test_one_word_stands_for_gradients_and_parameters_in_a_file_and_on_the_command_line():
    find = strategies().find_config
    for layer in (
        Layer({"links": {"far": "auto", "allow": "theory"}}),
        read_sets(["links.far=auto", "links.allow=theory"]),
        read_sets(["links.far.warmup_steps=3", "links.far=auto", "links.allow=theory"]),
        read_sets(["links.far=auto", "links.far.warmup_steps=3", "links.allow=theory"]),
    ):
        found = resolve(layer, find_config=find).run.links
        words = found.far.gradients, found.far.parameters, found.allow
        assert words == ("auto", "auto", "theory")
    with pytest.raises(ConfigError, match=r"links\.far\.gradients: .*contradict each other"):
        read_sets(["links.far=auto", "links.far.gradients=int8"])
    with pytest.raises(ConfigError, match=r"links\.allow: expected 'exact'.*found 'all'"):
        resolve(read_sets(["links.allow=all"]), find_config=find)
    below = Layer({"links": {"far": "auto", "allow": "theory"}})
    above = read_sets(["links.far.parameters=exact"])
    mixed = resolve(below, above, find_config=find).run.links.far
    assert (mixed.gradients, mixed.parameters) == ("auto", "exact")


HIDES_NOTHING_S = 1e-9
"""Seconds of a backward that are declared, and too short to hide anything."""

SENT = [TensorSpec("weight", (1024, 1024), torch.float32, trainable=True)]


def names_for(strategy: str, precision: str = "no", config: object = None, **links: object):
    """Return the methods that are chosen between two hosts at 1 Mbit/s, and the lines."""
    links = {"allow": "theory", "mbit_per_s": 1.0, "backward_s": HIDES_NOTHING_S, **links}
    far = FarConfig(gradients="auto", parameters="auto")
    methods = LinkMethods.configured(LinksConfig(far=far, **links))
    kind, options = find_strategy(strategy, config)
    sender = automatic.Sender(kind, options, Precision.of(precision))
    world = World(size=2, local_size=1, hosts=("a", "b"))
    found, lines = automatic.choose_links(methods, sender, SENT, world)
    assert found.auto is None
    return found.names, lines


def test_auto_considers_only_what_the_strategy_and_the_precision_can_take():
    (gradients, parameters), (line,) = names_for("ddp")
    assert gradients in ("topk", "powersgd")
    assert parameters == "exact"
    assert line.startswith("between hosts, auto, theory at most, 0.125 MB/s as links.mbit_per_s")
    assert "exact 33.6 s, bf16 16.8 s + " in line
    # What methods keep for the next step would have another loss scale.
    assert names_for("ddp", "fp16")[0] == ("bf16", "exact")
    # Of values of parameters only bf16 has a proof, or rounds as a dtype does.
    assert names_for("zero3")[0][1] == "bf16"
    assert names_for("zero3", allow="empirical")[0][1] == "int8"
    assert names_for("zero2")[0][1] in ("topk", "powersgd")
    hooked = find_strategy("ddp")[0].Config(hook="bf16")
    for names, (line,) in (
        names_for("ddp", config=hooked),
        names_for("plain"),
        names_for("zero2", allow="exact"),
    ):
        assert names == ("exact", "exact")
        assert line.endswith("all exact, since no other method can be taken here")

    local = find_strategy("local")[0].Config
    _, (line,) = names_for("local", config=local(workers="ranks", outer_momentum=0.0))
    assert "topk" in line
    _, (line,) = names_for("local", config=local(workers="ranks"))
    assert "topk" not in line
    assert "powersgd" in line

    assert names_for("ddp", backward_s=40.0)[0] == ("exact", "exact")
    assert names_for("ddp", backward_s=17.0)[0] == ("bf16", "exact")
    # Gathers of values hide behind half as long a forward.
    assert names_for("zero3", backward_s=40.0)[0] == ("exact", "exact")
    assert names_for("zero3", backward_s=17.0)[0] == ("exact", "bf16")


def test_a_choice_by_known_figures_is_about_trained_tensors_and_goes_on_from_a_checkpoint():
    kind, options = find_strategy("ddp")
    sender = automatic.Sender(kind, options, Precision.of("no"))
    far, found = FarConfig(gradients="auto"), []
    for rate, seconds in ((1e6, (1e-4, 1e-9)), (2e6, (2e-4, 2e-9))):
        link = SlowLink(bytes_per_s=rate, hosts=2, per_host=1)
        times = dict.fromkeys(compressors().names, EncodingTime(*seconds))
        figures = LinkFigures(link=link, source="as a test says", times=times)
        links = LinkMethods.configured(LinksConfig(far=far, allow="rounding"))
        found.append(links.awaiting(["gradients"], figures))
    world = World(size=2, local_size=1, hosts=("a", "b"))
    before, after = found
    assert hosts_apart(Mesh.plan({"dp": 2}, world), "dp", world, before) == 1
    frozen = TensorSpec("frozen", (1024, 1024), torch.float32, trainable=False)
    chosen, (line,) = automatic.settle_links(before, sender, [*SENT, frozen], HIDES_NOTHING_S)
    assert ": gradients bf16 (rounding), for 1 of 1 parameters (1,048,576 numbers); of " in line
    resumed, _ = automatic.resume_links(after, sender, automatic.saved_choice(chosen))
    first, again = (each.paying["gradients"] for each in (chosen, resumed))
    assert (again.name, again.link, again.time) == (first.name, first.link, first.time)


def test_the_dry_run_chooses_by_a_declared_rate_and_says_what_it_needs_otherwise(capsys):
    words = ["launch", "--dry-run", "--cpu", "--nproc-per-node", "1", "--nnodes", "2"]
    words += ["--rdzv-endpoint", "h:1", "--set", "links.far=auto", "--set", "links.allow=rounding"]
    assert run(words) == 0
    said = capsys.readouterr().out
    assert "links.far: auto cannot be foreseen without links.mbit_per_s" in said
    assert "all_reduce over dp " in said
    assert "all_to_all" not in said
    words += ["--set", "links.mbit_per_s=100"]
    assert run(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "12.5 MB/s as links.mbit_per_s says: gradients exact for 5 steps, which time" in said
    assert "then one of exact " in said
    assert "gradients auto, parameters exact, rounding at most, still to be chosen" in said
    assert "all_gather over dp.far" in said
    assert "all_to_all" not in said
    assert run([*words, "--set", f"links.backward_s={HIDES_NOTHING_S}"]) == 0
    said = capsys.readouterr().out
    assert "auto, rounding at most, 12.5 MB/s as links.mbit_per_s says: gradients bf16" in said
    assert "between hosts: gradients bf16 (rounding), parameters exact" in said
    assert "all_to_all over dp.far" in said
