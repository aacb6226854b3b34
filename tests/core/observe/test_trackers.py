"""The trackers of a run: which are chosen, what they get, and that none stops training."""

import enum
import json

import pytest
import torch.distributed as dist

from drivetrain.errors import ConfigError, UnknownPluginError, UsageError
from drivetrain.observe.trackers import Tracker, Trackers
from drivetrain.registry import Registry


class Memory(Tracker):
    """Remembers what it is told."""

    name = "memory"

    def __init__(self, run_name, **options):
        self.run_name, self.options = run_name, options
        self.said, self.finished = [], 0

    tracker = property(lambda self: self.said)

    def store_init_configuration(self, values):
        self.said.append(values)

    def log(self, values, step=None, **options):
        self.said.append((values, step, options))

    def finish(self):
        self.finished += 1


class Writing(Memory):
    name = "writing"
    requires_logging_directory = True


class Absent(Memory):
    name = "absent"
    module = "no_such_module_anywhere"


class Failing(Memory):
    name = "failing"

    def log(self, values, step=None, **options):
        super().log(values, step, **options)
        raise ConnectionError("no network")

    def finish(self):
        super().finish()
        raise ConnectionError("still none")


class Names(enum.Enum):
    MEMORY = "memory"


class Given(Registry):
    """A registry of what a test gives it."""

    def __init__(self, **plugins):
        super().__init__("drivetrain.trackers")
        self.plugins = plugins

    @property
    def names(self):
        return sorted(self.plugins)

    def load(self, name):
        if name not in self.plugins:
            raise UnknownPluginError(f"unknown tracker {name!r}; installed: {self.names}")
        plugin = self.plugins[name]
        if isinstance(plugin, Exception):
            raise plugin
        return plugin


def started(log_with, *, logging_dir=None, config=None, init_kwargs=None, **plugins):
    trackers = Trackers(log_with, logging_dir=logging_dir, registry=Given(**plugins))
    trackers.start("project", config, init_kwargs)
    return trackers


def test_trackers_are_given_found_and_begun_again():
    mine = Memory("mine")
    trackers = started(["memory", Memory, Names.MEMORY, mine, Writing], logging_dir="logs",
                       memory=Memory)  # fmt: skip
    assert [tracker.run_name for tracker in trackers.active] == ["project", "mine", "project"]
    assert trackers.active[1] is mine
    assert trackers.active[2].options == {"logging_dir": "logs"}
    assert started(None).active == []
    own = {"writing": {"logging_dir": "own"}}
    trackers = started([Writing], logging_dir="logs", init_kwargs=own)
    assert trackers.active[0].options == own["writing"]

    options = {"memory": {"entity": "team"}}
    trackers = started([Memory, Failing], config={"lr": 0.1}, init_kwargs=options)
    trackers.log({"loss": 1.0}, 3, {"memory": {"commit": True}})
    memory, failing = trackers.active
    assert memory.options == {"entity": "team"}
    assert memory.said == [{"lr": 0.1}, ({"loss": 1.0}, 3, {"commit": True})]
    assert failing.said == [{"lr": 0.1}, ({"loss": 1.0}, 3, {})]

    failing = Failing("mine")
    trackers = started(failing)
    for _ in range(2):
        trackers.start("project")
        trackers.log({"loss": 1.0})
        trackers.log({"loss": 2.0})
    assert failing.said == 2 * [({"loss": 1.0}, None, {})], "left out until the next start"

    trackers = started([Memory])
    (first,) = trackers.active
    trackers.start("second")
    (second,) = trackers.active
    assert (first.finished, second.run_name, second.finished) == (1, "second", 0)

    trackers = started([Memory])
    (memory,) = trackers.active
    assert trackers.get("memory") is memory
    assert trackers.get("memory", unwrap=True) is memory.said
    with pytest.raises(UsageError, match=r"found no 'wandb'; started: memory"):
        trackers.get("wandb")


def test_all_takes_what_can_be_used(caplog):
    plugins = {"memory": Memory, "writing": Writing, "absent": Absent}
    trackers = started("all", **plugins, broken=ConfigError("cannot be imported"))
    assert [tracker.name for tracker in trackers.active] == ["memory"]
    assert "'writing' writes files" in caplog.text
    assert "cannot be imported" in caplog.text
    assert "absent" not in caplog.text
    trackers = started(["memory", "all"], logging_dir="logs", **plugins)
    assert [tracker.name for tracker in trackers.active] == ["memory", "writing"]


def test_wrong_choices_fail_alike_on_every_process():
    for is_main in (True, False):
        for log_with, error, message in (
            ("nowhere", UnknownPluginError, "installed:"),
            ("writing", ConfigError, "pass project_dir"),
            ("absent", ConfigError, "pip install no_such_module_anywhere"),
            (3, UsageError, "found 3; installed: absent, writing"),
            (dict, UsageError, "name, class or object"),
        ):
            registry = Given(writing=Writing, absent=Absent)
            with pytest.raises(error, match=message):
                Trackers(log_with, logging_dir=None, is_main=is_main, registry=registry)


def test_secrets_are_not_stored_and_the_log_says_so(caplog):
    config = {
        "lr": 0.1,
        "hub": {"HF_Token": "hf_x", "name": "run"},
        "api_key": "x",
        "stores": [{"password": "x", "size": 1}, 2],
        "pair": ({"dsn": "x"}, 3),
        "client-secret": "x",
    }
    trackers = started([Memory], config=config)
    assert trackers.active[0].said == [{"lr": 0.1, "hub": {"name": "run"},
                                        "stores": [{"size": 1}, 2],
                                        "pair": ({}, 3)}]  # fmt: skip
    assert config["hub"]["HF_Token"] == "hf_x", "the argument changed"
    for name in ("hub.HF_Token", "api_key", "stores.0.password", "pair.0.dsn", "client-secret"):
        assert name in caplog.text
    assert "hf_x" not in caplog.text


def test_texts_by_the_name_of_a_secret_and_addresses_with_a_password_are_left_out():
    secrets = ["token", "hubToken", "AWS_SECRET", "access-key", "db_pwd", "auth", "sentry_dsn"]
    plain = {"url": "https://host:8080/data@2", "file": "C:/a:b@c", "tokenizer_name": "gpt2"}
    plain |= {"max_tokens": 10, "eos_token": "</s>", "num_key_value_heads": 8, "use_token": True}
    config = {**plain, **dict.fromkeys(secrets, "x"), "storage": "postgres://me:canary@host/runs"}
    assert started([Memory], config=config).active[0].said == [plain]


def test_a_failing_tracker_is_left_out_after_one_warning(caplog):
    trackers = started([Failing, Memory], config={"a": 1})
    failing, memory = trackers.active
    for step in range(3):
        trackers.log({"loss": 1.0}, step)
    trackers.finish()
    assert (len(failing.said), failing.finished) == (2, 1)
    assert (len(memory.said), memory.finished) == (4, 1)
    assert [record.message for record in caplog.records] == [
        "the tracker 'failing' failed and is left out from here on: ConnectionError: no network"
    ]


def test_other_processes_get_inert_objects():
    trackers = Trackers([Memory], logging_dir=None, is_main=False)
    trackers.start("project", {"a": 1})
    trackers.log({"loss": 1.0})
    assert trackers.active == []
    inert = trackers.get("whatever", unwrap=True)
    inert.run.summary["best"] = inert.define_metric("loss", summary="min")
    inert.field = 3
    with inert.run(1) as run:
        assert not run
        assert list(run.items()) == []
    assert not hasattr(inert, "__array__")
    trackers.finish()


@pytest.mark.ranks(2)
def test_only_the_main_rank_writes(tmp_path):
    trackers = Trackers("jsonl", logging_dir=str(tmp_path), is_main=dist.get_rank() == 0)
    trackers.start("project")
    trackers.log({"rank": dist.get_rank()}, 1)
    trackers.finish()
    dist.barrier()
    (path,) = tmp_path.iterdir()
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["rank"] == 0
