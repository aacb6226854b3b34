"""``drivetrain config``: the questions as an engine, the proposal, and a dialog on a terminal."""

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain.config import Layer, read_file
from drivetrain.config.resolve import resolve
from drivetrain.errors import ConfigError
from drivetrain.hardware.sizes import GIB
from drivetrain.registry import strategies
from drivetrain_launch.commands import preview
from drivetrain_launch.commands import wizard as questions
from drivetrain_launch.commands.options import check_run
from drivetrain_launch.commands.wizard import HOSTS, LINK, MODEL, PLACE, STRATEGY_KEY, Seen, Wizard

DOWN = "\x1b[B"
UP = "\x1b[A"
CPU = Seen(cores=2, memory=64 * GIB)
A100 = Seen(cores=64, memory=512 * GIB, devices=8, device="A100", device_memory=80 * GIB)


def offered():
    """Return the strategies that are there for training."""
    return strategies().choices


@pytest.fixture
def wizard(command):
    return Wizard(strategies(), CPU)


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


def at(wizard, key):
    """Take defaults until a question."""
    while wizard.current.key != key:
        wizard.answer(wizard.current.default)


def placed(wizard, place, hosts):
    """Answer where the run starts, and on which hosts."""
    wizard.answer(place)
    wizard.answer(hosts)
    return wizard


def test_questions_are_what_the_wizard_cannot_see_then_the_declarations_of_the_strategy(wizard):
    alone = [PLACE, MODEL, "precision", STRATEGY_KEY, "strategy.flavor", "strategy.spoons"]
    answered(wizard, "toy")
    walk(wizard)
    assert list(wizard.answers) == alone
    cluster = placed(Wizard(strategies(), A100), "ssh", "n1,n2 x 8 x h100")
    answered(cluster, "toy")
    walk(cluster)
    assert list(cluster.answers) == [PLACE, HOSTS, LINK, *alone[1:]]


def test_hosts_that_a_place_cannot_have_are_refused():
    for place, text, message in (
        ("slurm", "4", "expected HOSTS x DEVICES x MEMORY"),
        ("slurm", "4 x 0", "expected HOSTS x DEVICES x MEMORY"),
        ("slurm", "4 x 8 x h101", "expected a number of GiB or one of"),
        ("slurm", "0 x 8", "expected a number from 1 for the hosts, found 0"),
        ("kubernetes", "n1,n2 x 8", "expected the number of hosts, which the scheduler chooses"),
        ("ssh", "4 x 8", "expected names, such as n1,n2"),
        ("ssh", "n1:8,n2 x 8", "expected names alone"),
        ("hand", "n1,n1 x 8", "n1 is there twice"),
        ("hand", "-n1 x 8", "expected a host such as n1"),
    ):
        with pytest.raises(ConfigError, match=message):
            questions.read_machines(text, place)
    assert questions.read_machines("1 x 2 x cpu", "hand").cpu


def test_what_is_seen_of_hosts_is_the_default(wizard):
    listed = questions.read_hosts("n1:4,n2:4")
    seen = replace(A100, hosts=listed)
    assert Wizard(strategies(), seen).current.default == "ssh"
    assert seen.hosts_of("ssh") == "n1,n2 x 4 x 80"
    assert replace(A100, hosts=questions.read_hosts("n1:4,n2:8")).hosts_of("ssh") == ""
    job = replace(CPU, nodes=3)
    assert Wizard(strategies(), job).current.default == "slurm"
    assert job.hosts_of("slurm") == "3 x 2 x cpu"
    assert job.hosts_of("kubernetes") == CPU.hosts_of("slurm") == ""
    wizard.answer("slurm")
    with pytest.raises(ConfigError, match="expected HOSTS x DEVICES x MEMORY"):
        wizard.read(wizard.current, wizard.current.default)


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


def test_answers_become_a_file_with_all_that_is_no_default_and_its_meaning(wizard):
    answered(wizard, "toy", "salted", 2)
    assert wizard.current is None
    values, text = wizard.values(), wizard.text()
    strategy = {"name": "toy", "flavor": "salted"}
    assert values == {"strategy": strategy, "launch": {"nproc_per_node": 2}}
    assert "name: toy  # averages each gradient by itself\n" in text
    assert "  # Processes per host; auto: one per accelerator" in text
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
    assert wizard.current.key == "precision"
    for _ in range(20):
        wizard.back()
    assert wizard.current.key == PLACE
    assert not wizard.back()
    placed(wizard, "hand", "n1,n2 x 1 x cpu")
    wizard.back()
    wizard.back()
    wizard.answer("slurm")
    assert wizard.current.default == ""  # names are nothing that SLURM takes


def test_the_command_at_the_end_is_one_that_is_accepted(command, tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "mine.py").write_text("import sys; sys.exit(sys.argv[1])")
    path = Path("run.yaml")
    for place, hosts, launch in (
        ("hand", "1 x 2 x cpu", {"nproc_per_node": 2, "device": "cpu"}),
        ("hand", "n1,n2 x 4 x cpu", {"nproc_per_node": 4, "device": "cpu", "nnodes": 2,
                                     "rdzv_endpoint": "n1:29400"}),
        ("ssh", "n1,me@n2 x 2 x cpu", {"device": "cpu"}),
        ("slurm", "2 x 2 x cpu", {"device": "cpu"}),
        ("kubernetes", "2 x 4", None),
    ):  # fmt: skip
        wizard = placed(Wizard(strategies(), CPU), place, hosts)
        answered(wizard, "megatron", 2, 1)
        assert wizard.values().get("launch") == launch
        path.write_text(wizard.text())
        assert command.output("config", "check", "run.yaml") == "ok\n"
        first, *then = questions.start_line(path, wizard).splitlines()
        words = shlex.split(first.partition(": ")[2])
        dry = ["--dry-run"] if words[1] == "launch" else []
        out = command.output(words[1], *dry, *words[2:])
        if dry:
            ranks = {"1 x 2": 2, "n1,n2": 8}.get(hosts[:5], 4)
            assert f"dp {ranks // 2}" in out or f"dp={ranks // 2}" in out, out
        else:
            job = Path(shlex.split(then[0])[-1]).read_text()
            assert "strategy.tp=2" in job
            assert ("--nodes=2" if place == "slurm" else "nvidia.com/gpu") in job
            out = command.output(*shlex.split(then[1].partition(": ")[2])[1:])
            assert f"dp={2 if place == 'slurm' else 4} x pp=1 (2 x" in out, out
    wizard = Wizard(strategies(), CPU)
    at(wizard, MODEL)
    with pytest.raises(ConfigError, match=r"mine.py:1: .* found before it SystemExit: 3"):
        wizard.answer("mine.py 3")
    wizard.answers |= {PLACE: "here", MODEL: "mine.py 'two words'"}
    line = questions.start_line(path, wizard)
    assert line.endswith("launch --config run.yaml mine.py 'two words'")


def test_wizard_through_a_terminal(sandbox):
    sandbox.script("an old file\n", "drivetrain.yaml")
    sandbox.script("n1 slots=4\nn2 slots=4\n", "hostfile")
    (sandbox.folder / ".ssh").mkdir()
    sandbox.script("Host a b *.c\n  User me\n", ".ssh/config")
    program, *words = sandbox.command("config")
    terminal = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "HOME": str(sandbox.folder)}
    env = sandbox.environment({**terminal, "SLURM_NNODES": "1", "KUBERNETES_SERVICE_HOST": "k"})

    def start():
        return pexpect.spawn(
            program, words, cwd=str(sandbox.folder), env=env,
            timeout=300, encoding="utf-8", dimensions=(60, 80),
            preexec_fn=lambda: os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:2]),
        )  # fmt: skip

    def answer(question, keys):
        """Type when the question is there: what comes before it is lost."""
        terminal.expect_exact(question)
        terminal.send(keys)

    terminal = start()
    for line in (
        "CPU cores, ",
        "SLURM: this is a job of 1 host.",
        "Kubernetes: this is a pod.",
        "hostfile: n1, n2.",
        "~/.ssh/config: a, b.",
    ):
        terminal.expect_exact(line)
    answer("Where does it run?", "<")
    terminal.expect_exact("this is the first question")
    answer("Where does it run?", "\r")  # a hostfile stands for ssh
    answer("Which hosts? [n1,n2 x 4 x ", "4 x 8\r")
    terminal.expect_exact("expected names, such as n1,n2")
    answer("Which hosts?", "n1<\r")
    answer("Where does it run?", UP + UP + "\r")  # from ssh
    answer("Which model? [not yet]", "huge\r")
    terminal.expect_exact("number of parameters such as 7B")
    answer("Which model?", "100M\r")
    answer("Which precision?", "<")
    answer("Which model? [100M]", "\x03")
    answer("Keep the answers in drivetrain.draft.json", "y")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130

    terminal = start()
    answer("Where does it run?", "\r")
    answer("Which model? [100M]", "\x04")  # Ctrl-D is as Ctrl-C
    answer("Keep the answers in drivetrain.draft.json", "y")
    terminal.expect(pexpect.EOF)

    terminal = start()
    answer("Where does it run?", "\r")
    answer("Which model? [100M]", "\r")
    answer("Which precision?", DOWN + "\r")
    terminal.expect_exact("Comparing the installed strategies")
    terminal.expect_exact("Proposed: ddp, because it is the usual strategy")
    answer("How is the training step", presses(strategies().default(), "megatron") + "\r")
    answer("How many ranks share every layer?", "3\r")
    terminal.expect_exact("expected a number of ranks that is a multiple of tp x pp")
    answer("How many ranks share every layer?", "2\r")
    answer("How many pipeline stages?", "<\r")
    answer("How many ranks share every layer? [2]", "<\r")
    answer("How is the training step", presses("megatron", "toy") + "\r")
    answer("Which flavor?", DOWN + "\r")
    answer("How many spoons?", "99\r")
    terminal.expect_exact("expected at most 9, found 99")
    answer("How many spoons?", "4\r")
    answer("Write it to which file?", "<\r")
    answer("How many spoons? [4]", "\r")
    answer("Write it to which file?", "\r")
    answer("drivetrain.yaml exists. Replace it?", "\r")
    answer("Write it to which file?", "no/new.yaml\r")
    terminal.expect_exact("cannot write no/new.yaml")
    answer("Write it to which file?", "new.yaml\r")
    terminal.expect_exact("run: drivetrain launch --config new.yaml train.py")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    assert (sandbox.folder / "drivetrain.yaml").read_text() == "an old file\n"
    assert not (sandbox.folder / "drivetrain.draft.json").exists()
    written = yaml.safe_load((sandbox.folder / "new.yaml").read_text())
    assert written == {
        "strategy": {"name": "toy", "flavor": "salted", "spoons": 4},
        "precision": "bf16",
        "launch": {"nproc_per_node": len(os.sched_getaffinity(0))},
    }


def presses(chosen, name):
    """Return what moves from the strategy that is chosen to another one."""
    others = sorted({*offered(), "toy"} - {chosen})
    return DOWN * (others.index(name) + 1)


# --- the proposal ---


def proposed(wizard, **facts):
    """Answer with these facts and defaults, and return the question about the strategy."""
    given = {f"{questions.FACTS}{key}": value for key, value in facts.items()}
    while wizard.current.key != STRATEGY_KEY:
        wizard.answer(given.pop(wizard.current.key, wizard.current.default))
    assert not given
    return wizard.current


def asked(seen=A100, **facts):
    """Return the help of the question about the strategy, in which the proposal stands."""
    return proposed(Wizard(strategies(), seen), **facts).help


def test_usual_strategy_is_proposed_where_it_fits(command):
    # 1e9 fp32 elements: parameters, gradients and two states of Adam, 14.9 GiB.
    assert asked(model="1B") == (
        "Proposed: ddp, because it is the usual strategy, holds 14.9 GiB on a device, and fits in "
        "80.0 GiB with room for activations, for 1B parameters on 8 ranks."
    )
    question = proposed(Wizard(strategies(), A100), model="7B")
    assert question.default != strategies().default()
    held = float(question.help.partition("holds ")[2].partition(" GiB")[0])
    assert held < 0.75 * 80 < 7 * 14.9
    assert "it sends the fewest bytes of all forms that fit" in question.help


def test_ranks_on_the_cpu_share_the_memory_of_their_host(command):
    text = asked(replace(CPU, cores=8), model="1B")
    assert "and fits in 8.0 GiB with room for activations" in text
    assert "of host memory for each rank" in text


def test_a_form_that_needs_more_host_memory_than_there_is_does_not_fit(command):
    small = replace(A100, devices=1, device_memory=8 * GIB)
    assert "Proposed: offload" in asked(small, model="1B")
    text = asked(replace(small, memory=GIB), model="1B")
    assert "because nothing fits" in text
    assert "of host memory for each rank" in text or "on a device" in text


def test_without_the_memory_the_proposal_says_what_a_device_must_have(command):
    """The whole of 7B needs 139 GiB with room for activations, which few devices have."""
    hosts = {"place": "slurm", "hosts": "2 x 2"}
    text = asked(model="7B", **hosts)
    assert "Proposed: ddp" not in text
    assert "holds 26.3 GiB on a device, and needs devices of 35.1 GiB" in text
    assert "Proposed: ddp" in asked(model="100M", **hosts)
    unknown = asked(**hosts)
    assert "the usual strategy, holds 14.9 GiB on a device, and needs devices of 19.9" in unknown
    assert unknown.endswith("for each billion of parameters on 4 ranks.")


CLUSTER = {"place": "ssh", "hosts": "n1,n2,n3,n4 x 8 x a100"}


def test_slow_link_takes_the_form_that_sends_least_between_hosts(command):
    wizard = Wizard(strategies(), CPU)
    question = proposed(wizard, model="1B", link="empirical", **CLUSTER)
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
    text = asked(CPU, model="1B", link="exact", **CLUSTER)
    assert "Proposed: fsdp sharding hybrid" in text


def test_slow_link_says_how_far_from_exact_training_may_be(wizard):
    question = proposed(wizard, model="1B", link="theory", **CLUSTER)
    wizard.answer(question.default)
    walk(wizard)
    assert wizard.values()["links"] == {"allow": "theory", "far": "auto"}
    found = resolve(Layer(wizard.values()), find_config=strategies().find_config).run.links
    assert (found.far.gradients, found.far.parameters, found.allow) == ("auto", "auto", "theory")
    while wizard.current is None or wizard.current.key != HOSTS:
        wizard.back()
    wizard.answer("n1 x 8 x a100")  # one host, which asks nothing
    assert wizard.current.key == MODEL
    assert "links" not in wizard.values()


def test_slow_link_divides_inside_of_hosts_what_does_not_fit_whole(wizard):
    question = proposed(wizard, model="7B", link="exact", **CLUSTER)
    assert "Proposed: fsdp sharding hybrid, because it sends the fewest bytes" in question.help
    assert "39.1 GiB in a step, holds 13.3 GiB on a device" in question.help
    wizard.answer("fsdp")
    assert (wizard.current.key, wizard.current.default) == ("strategy.sharding", "hybrid")


def test_sizes_of_the_proposed_form_are_the_defaults_of_its_questions(command):
    wizard = Wizard(strategies(), replace(A100, device_memory=GIB))
    question = proposed(wizard, model="7B")
    assert "because nothing fits, and this form comes closest: it needs devices of" in question.help
    assert "and lacks" in question.help
    promise, _ = wizard._proposal()
    wizard.answer(promise.name)
    asked = {}
    while (question := wizard.current) is not None:
        asked[question.key.removeprefix("strategy.")] = question.default
        wizard.answer(question.default)
    assert promise.options.items() <= asked.items()
    assert f"# Proposed: {promise.form}, because nothing fits" in wizard.text()


def test_sizes_that_do_not_divide_the_ranks_are_refused_where_they_are_typed(wizard):
    answered(wizard, "megatron")
    with pytest.raises(ConfigError, match=r"a multiple of tp x pp = 3 x 1 = 3, found 2"):
        wizard.answer(3)
    wizard.answer(2)


# --- all that the wizard writes, launches ---

TYPED = {
    HOSTS: ["1 x 2 x cpu", "2 x 4", "n1,n2 x 1 x cpu", "n1,n2 x 6 x a100"],
    MODEL: ["not yet", "100M", "7B"],
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
        wizard = Wizard(strategies(), CPU)
        answered(wizard, name)
        typed = [question for question in wizard._questions() if not question.choices]
        assert {question.key for question in typed} <= TYPED.keys(), name


def test_auto_launches_with_the_hardware_that_the_wizard_asks_for(command, tmp_path):
    for hardware in TYPED["strategy.hardware"]:
        wizard = Wizard(strategies(), CPU)
        answered(wizard, "auto")
        wizard.answer(wizard.read(wizard.current, hardware))
        assert wizard.current is None, hardware
        launches(wizard, tmp_path / "run.yaml")
    wizard.back()
    with pytest.raises(ConfigError, match=r"unknown hardware 'h201'; did you mean h200"):
        wizard.answer("h201")
    wrong = tmp_path / "measured.yaml"
    wrong.write_text("device: 1\n")
    with pytest.raises(ConfigError, match=r"of hardware:\n(.*\n)*  device: expected a mapping, f"):
        wizard.answer(str(wrong))


def launches(wizard, path):
    """Refuse what the wizard wrote, as the launcher would; the command may name the ranks."""
    path.write_text(wizard.text())
    file, machines = read_file(path), wizard.machines
    resolved = resolve(file, find_config=strategies().find_config)
    check_run(resolved)
    assert not any(key.startswith(questions.FACTS) for key, _, _ in resolved.rows())
    started = {"nproc_per_node": machines.ranks, "nnodes": machines.count}
    command = Layer({"launch": {**started, "rdzv_endpoint": "n1:29400"}})
    preview.preview(resolve(file, command, find_config=strategies().find_config))


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_every_file_that_the_wizard_writes_launches(command, tmp_path, monkeypatch, data):
    monkeypatch.setattr(preview, "accelerators", lambda: 0)
    wizard = Wizard(strategies(), data.draw(st.sampled_from([CPU, A100])))
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
