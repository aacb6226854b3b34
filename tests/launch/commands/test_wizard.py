"""``drivetrain config``: the questions as an engine, the proposal, and a dialog on a terminal."""

import pexpect
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain.config import Layer, RunConfig, options_of, read_file
from drivetrain.config.resolve import resolve
from drivetrain.errors import ConfigError
from drivetrain.registry import strategies
from drivetrain_launch.commands import preview
from drivetrain_launch.forecast.planning import check_run
from drivetrain_launch.wizard import advice, questions
from drivetrain_launch.wizard.questions import FACTS, MEMORY, MODEL, NEED, STRATEGY_KEY, Wizard

DOWN = "\x1b[B"
UP = "\x1b[A"
LAUNCH_KEYS = ["launch.nproc_per_node", "launch.nnodes", "launch.device"]
RUN_KEYS = [knob.name for knob in options_of(RunConfig) if knob.question]


def offered():
    """Return the strategies that are there for training."""
    return strategies().choices


@pytest.fixture
def wizard(command):
    return Wizard(strategies())


def answered(wizard, strategy, *answers):
    """Take defaults until the question about the strategy; answer it and the next ones."""
    at(wizard, STRATEGY_KEY)
    for each in (strategy, *answers):
        wizard.answer(each)


def walk(wizard):
    """Take every default; return the keys in the order in which they were asked."""
    keys = []
    while (question := wizard.current) is not None:
        keys.append(question.key)
        wizard.answer(question.default)
    return keys


def test_questions_are_what_a_user_knows_then_the_strategy_and_its_declarations(wizard):
    at(wizard, STRATEGY_KEY)
    assert list(wizard.answers) == [*LAUNCH_KEYS, MEMORY, MODEL, NEED, *RUN_KEYS]
    wizard.answer("toy")
    assert walk(wizard) == ["strategy.flavor", "strategy.spoons"]


def at(wizard, key):
    """Take defaults until a question."""
    while wizard.current.key != key:
        wizard.answer(wizard.current.default)


def test_several_hosts_are_asked_where_they_meet(wizard):
    at(wizard, "launch.nnodes")
    wizard.answer(2)
    assert wizard.current.key == "launch.rdzv_endpoint"
    for wrong in ("", "10.0.0.1"):
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            wizard.read(wizard.current, wrong)
    wizard.answer("10.0.0.1:29400")
    wizard.back()
    wizard.back()
    wizard.answer(1)
    assert wizard.current.key == "launch.device"
    assert "rdzv_endpoint" not in wizard.values()["launch"]


def test_a_store_of_files_is_asked_for_its_directory(wizard):
    answered(wizard, "offload", "nvme")
    with pytest.raises(ConfigError, match=r"expected offload\.path with the store nvme"):
        wizard.read(wizard.current, "")
    wizard.back()
    wizard.answer("cpu")
    assert wizard.read(wizard.current, "") == ""
    wizard.back()
    wizard.answer("nvme")
    wizard.answer("/mnt/nvme")
    assert wizard.current is None


def test_default_path_is_short_and_the_default_strategy_stands_first(wizard):
    at(wizard, STRATEGY_KEY)
    question = wizard.current
    assert question.choices[0].value == question.default == strategies().default()
    assert {choice.value for choice in question.choices} == set(offered())
    assert strategies().reference() not in offered()
    assert "toy: averages each gradient by itself" in {c.title for c in question.choices}
    assert len(walk(wizard)) <= 2


def test_answers_become_a_file_that_says_the_meaning_of_each_key(wizard):
    answered(wizard, "toy", "salted", 9)
    assert wizard.current is None
    values, text = wizard.values(), wizard.text()
    assert list(values) == ["strategy", "launch", *RUN_KEYS]
    assert values["strategy"] == {"name": "toy", "flavor": "salted", "spoons": 9}
    assert values["launch"]["nnodes"] == 1
    assert "name: toy  # averages each gradient by itself\n" in text
    assert "accumulation: 1  # Micro-batches per optimizer step.\n" in text
    assert max(map(len, text.splitlines())) <= 80
    assert yaml.safe_load(text) == values


def test_hints_break_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = "auto takes the accelerators of the host; cpu leaves them alone."
    assert questions.hint(text).split() == text.split()
    assert [len(line) <= 40 for line in questions.hint(text).splitlines()] == [True, True]


def test_back_keeps_the_answer_as_the_default(wizard):
    answered(wizard, "toy", "salted")
    wizard.back()
    assert (wizard.current.key, wizard.current.default) == ("strategy.flavor", "salted")
    wizard.back()
    wizard.answer(strategies().default())  # drops the options of the first one
    chosen = {key for key in wizard.answers if key.startswith("strategy.")}
    assert chosen == {STRATEGY_KEY}
    wizard.back()
    wizard.back()
    assert wizard.current.key == RUN_KEYS[-1]
    for _ in range(20):
        wizard.back()
    assert wizard.current.key == LAUNCH_KEYS[0]
    assert not wizard.can_go_back


def test_typed_answers_are_held_to_the_limits(wizard):
    answered(wizard, "toy", "plain")
    for text, message in (("0", "at least 1, found 0"), ("10", "at most 9"), ("many", "'many'")):
        with pytest.raises(ConfigError, match=f"^strategy.spoons: .*{message}"):
            wizard.read(wizard.current, text)
    assert wizard.read(wizard.current, "7") == 7


def test_wizard_through_a_terminal(sandbox):
    sandbox.script("an old file\n", "drivetrain.yaml")
    program, *words = sandbox.command("config")
    terminal = pexpect.spawn(
        program, words, cwd=str(sandbox.folder),
        env=sandbox.environment({"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}),
        timeout=300, encoding="utf-8", dimensions=(60, 80),
    )  # fmt: skip

    def answer(question, keys):
        """Type when the question is there: what comes before it is lost."""
        terminal.expect_exact(question)
        terminal.send(keys)

    answer("How many processes on each host? [auto]", "<\r")
    terminal.expect_exact("this is the first question")
    answer("How many processes on each host?", "2\r")  # the default needs no removal
    answer("How many hosts?", "\r")
    answer("Which devices?", DOWN + "\r")
    answer("How much memory has each host?", "64\r")
    answer("How large is the model?", "huge\r")
    terminal.expect_exact("expected a number of parameters such as 7B")
    answer("How large is the model?", "<\r")
    answer("How much memory has each host? [64]", "\r")
    answer("How large is the model?", "100M\r")
    answer("What hurts?", UP + "\r")  # upwards from the first is "back"
    answer("How large is the model?", "\r")
    answer("What hurts?", "\r")
    answer("Which precision?", DOWN + "\r")
    answer("How many micro-batches", "\r")
    terminal.expect_exact("Comparing the installed strategies")
    terminal.expect_exact("Proposed: ddp, because it is the usual strategy")
    answer("How is the training step", DOWN * strategies_below_the_default("toy") + "\r")
    answer("Which flavor?", DOWN + "\r")
    answer("How many spoons?", "99\r")
    terminal.expect_exact("expected at most 9, found 99")
    answer("How many spoons?", "4\r")
    answer("Write it to which file?", "\r")
    answer("drivetrain.yaml exists. Replace it?", "n")
    answer("Write it to which file?", "no/new.yaml\r")
    terminal.expect_exact("cannot write no/new.yaml")
    answer("Write it to which file?", "new.yaml\r")
    terminal.expect_exact("run: drivetrain launch --config new.yaml train.py")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    assert (sandbox.folder / "drivetrain.yaml").read_text() == "an old file\n"
    written = yaml.safe_load((sandbox.folder / "new.yaml").read_text())
    assert written["strategy"] == {"name": "toy", "flavor": "salted", "spoons": 4}
    assert written["precision"] == "bf16"
    assert written["launch"] == {"nproc_per_node": 2, "nnodes": 1, "device": "cpu"}


def strategies_below_the_default(name):
    """Return how often to press Down to get from the default to another strategy."""
    installed = strategies()
    others = sorted({*offered(), "toy"} - {installed.default()})
    return others.index(name) + 1


# --- the proposal ---


def proposed(wizard, **facts):
    """Answer with these facts and defaults, and return the question about the strategy."""
    given = {
        "launch.nproc_per_node": 8,
        **{key.replace("__", "."): value for key, value in facts.items()},
    }
    while wizard.current.key != STRATEGY_KEY:
        wizard.answer(given.pop(wizard.current.key, wizard.current.default))
    assert not given
    return wizard.current


def test_usual_strategy_is_proposed_where_it_fits(wizard):
    question = proposed(wizard, facts__memory="a100", facts__model="1B")
    assert question.default == strategies().default()
    # 1e9 fp32 elements: parameters, gradients and two states of Adam, 14.9 GiB.
    assert question.help == (
        "Proposed: ddp, because it is the usual strategy, holds 14.9 GiB on a device, and fits in "
        "80.0 GiB with room for activations, for 1B parameters on 8 ranks."
    )
    question = proposed(Wizard(strategies()), facts__memory="a100", facts__model="7B")
    assert question.default != strategies().default()
    held = float(question.help.partition("holds ")[2].partition(" GiB")[0])
    assert held < 0.75 * 80 < 7 * 14.9
    assert "it sends the fewest bytes of all forms that fit in 80.0 GiB" in question.help


def test_ranks_on_the_cpu_share_the_memory_of_their_host(wizard):
    question = proposed(wizard, launch__device="cpu", facts__memory="64", facts__model="1B")
    assert "of all forms that fit in 8.0 GiB" in question.help


def test_scarce_memory_takes_the_form_that_holds_least(wizard):
    question = proposed(wizard, facts__need="memory")
    least = min(candidate.held for candidate in candidates_of_a_billion(8) if candidate.counted)
    assert f"it holds the fewest bytes on a device, {least / 2**30:.1f} GiB" in question.help


def candidates_of_a_billion(ranks):
    resolved = resolve(find_config=strategies().find_config)
    promises = advice.promises_for(advice.of_size(10**9), resolved, ranks)
    return [advice.Contender(promise, on_accelerators=True) for promise in promises if promise.cost]


CLUSTER = {"launch__nnodes": 4, "launch__rdzv_endpoint": "10.0.0.1:29400", "facts__need": "link"}


def test_slow_link_takes_the_form_that_sends_least_between_hosts(wizard):
    question = proposed(wizard, facts__model="1B", facts__memory="a100", **CLUSTER)
    # In groups of 8, each rank all-reduces 1/8 of 3.7 GiB over 4 hosts: 8 x 2 x 3/4 x 1/8.
    assert question.help.startswith(
        "Proposed: ddp hook powersgd, because it sends the fewest bytes from a host to the others"
    )
    assert (
        "gradients are approximated, and the best form without that is fsdp sharding hybrid, "
        "which sends 5.6 GiB"
    ) in question.help
    wizard.answer("ddp")
    assert (wizard.current.key, wizard.current.default) == ("strategy.hook", "powersgd")
    wizard.answer("powersgd")
    assert wizard.current is None


def test_slow_link_asks_how_far_from_exact_training_may_be(wizard):
    allowed = {**CLUSTER, "links__allow": "theory"}
    question = proposed(wizard, facts__model="1B", facts__memory="a100", **allowed)
    wizard.answer(question.default)
    walk(wizard)
    assert wizard.values()["links"] == {"allow": "theory", "far": "auto"}
    assert "far: auto" in wizard.text()
    found = resolve(Layer(wizard.values()), find_config=strategies().find_config).run.links
    assert (found.far.gradients, found.far.parameters, found.allow) == ("auto", "auto", "theory")
    while wizard.current is None or wizard.current.key != NEED:
        wizard.back()
    wizard.answer("memory")
    assert wizard.current.key != "links.allow"
    assert "links" not in wizard.values()
    inside = Wizard(strategies())
    at(inside, NEED)
    inside.answer("link")  # of one host, which asks nothing
    assert inside.current.key != "links.allow"


def test_slow_link_divides_inside_of_hosts_what_does_not_fit_whole(wizard):
    question = proposed(wizard, facts__model="7B", facts__memory="a100", **CLUSTER)
    assert "Proposed: fsdp sharding hybrid, because it sends the fewest bytes" in question.help
    assert "39.1 GiB in a step, and holds 13.3 GiB on a device" in question.help
    wizard.answer("fsdp")
    assert (wizard.current.key, wizard.current.default) == ("strategy.sharding", "hybrid")


def test_sizes_of_the_proposed_form_are_the_defaults_of_its_questions(wizard):
    question = proposed(wizard, facts__memory="1", facts__model="7B")
    assert "because nothing fits in 1.0 GiB with room for activations" in question.help
    proposal = wizard._proposal()
    wizard.answer(proposal.strategy)
    asked = {}
    while (question := wizard.current) is not None:
        asked[question.key.removeprefix("strategy.")] = question.default
        wizard.answer(question.default)
    assert proposal.options.items() <= asked.items()
    assert f"# Proposed: {proposal.form}, because nothing fits" in wizard.text()


def test_sizes_that_fit_one_number_of_ranks_are_refused_for_any_number(wizard):
    answered(wizard, "megatron", 2)
    assert wizard.current.key == "strategy.pp"
    with pytest.raises(ConfigError, match=r"left open \(auto\).* go back and give the number"):
        wizard.answer(1)


# --- all that the wizard writes, launches ---

TYPED = {
    "launch.nproc_per_node": ["auto", 1, 2, 4, 6],
    "launch.nnodes": [1, 2],
    "launch.rdzv_endpoint": ["10.0.0.1:29400"],
    MEMORY: ["", "a100", "2"],
    MODEL: ["", "100M", "7B"],
    "accumulation": [1, 4],
    "strategy.tp": [1, 2, 3],
    "strategy.pp": [1, 2],
    "strategy.optimizer": ["cpu", "nvme"],
    "strategy.path": ["", "/mnt/nvme"],
    "strategy.hardware": ["", "h200", "measured.yaml"],
    "strategy.every": [1, 30],
    "strategy.spoons": [1, 9],
}


def test_every_typed_question_of_a_strategy_has_answers_to_draw(command):
    for name in offered():
        wizard = Wizard(strategies())
        answered(wizard, name)
        asked = [question for question in wizard._questions() if not question.choices]
        assert {question.key for question in asked} <= TYPED.keys(), name


def test_auto_launches_with_the_hardware_that_the_wizard_asks_for(command, tmp_path):
    for hardware in TYPED["strategy.hardware"]:
        wizard = Wizard(strategies())
        answered(wizard, "auto")
        wizard.answer(wizard.read(wizard.current, hardware))
        assert wizard.current is None, hardware
        launches(wizard, tmp_path / "run.yaml")
    wizard.back()
    with pytest.raises(ConfigError, match=r"unknown hardware 'h201'; did you mean h200"):
        wizard.answer("h201")
    wrong = tmp_path / "measured.yaml"
    wrong.write_text("device: 1\n")
    with pytest.raises(ConfigError, match="is no description of hardware"):
        wizard.answer(str(wrong))


def launches(wizard, path):
    """Refuse what the wizard wrote, as the launcher would."""
    path.write_text(wizard.text())
    resolved = resolve(read_file(path), find_config=strategies().find_config)
    check_run(resolved)
    assert not any(key.startswith(FACTS) for key, _, _ in resolved.rows())
    preview.preview(resolved)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_every_file_that_the_wizard_writes_launches(command, tmp_path, monkeypatch, data):
    monkeypatch.setattr(preview, "accelerators", lambda: 0)
    wizard = Wizard(strategies())
    refused = 0
    while (question := wizard.current) is not None:
        values = [choice.value for choice in question.choices] or TYPED[question.key]
        try:
            wizard.answer(data.draw(st.sampled_from(values), label=question.key))
        except ConfigError:
            refused += 1
            if refused > 3:  # the answers before leave no way on: a user goes back
                return
    launches(wizard, tmp_path / "run.yaml")
