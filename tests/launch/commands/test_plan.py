"""``drivetrain plan`` and ``drivetrain hardware``: published measurements, and bad input."""

import json
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import yaml

from drivetrain.errors import ConfigError
from drivetrain.hardware.description import hardware_names, hardware_text, load_hardware
from drivetrain.planner import search as predict
from drivetrain.planner.layout import read_layout
from drivetrain.planner.search import search
from drivetrain.simulator.step import SimulatedRun
from drivetrain.simulator.transformer import GptShape
from drivetrain_launch.commands.plan import _with_link, file_of, found_rows
from foreign_files import LLAMA

TINY = ("--gpt", "layers=2,hidden=64,heads=2,seq=64", "--batch", "8")
SMALL = ("--gpt", "layers=4,hidden=1024,heads=16,seq=1024", "--batch", "16")
H100 = load_hardware("h100")
HOST = ("--hardware", "a100-80gb", "--nnodes", "1", "--nproc-per-node", "8")
EIGHT = predict.Task(GptShape(layers=8, hidden=256, heads=4, seq=64), 64, H100, 1, 8)

# Published steps on A100 80 GB hosts of 8, fp16, sequences of 2048, vocabulary 51200: sizes of the
# model, batch, hosts, layout, and the share of the peak that the step's own operations reach.
# Narayanan et al. 2021 (arXiv 2104.04473), table 1: 163 TFLOP/s per device at 1 T parameters,
# where operations computed again count. Korthikanti et al. 2022 (arXiv 2205.05198), abstract: 530 B
# parameters on 2240 devices, with and without full recomputation.
LARGE = "layers=105,hidden=20480,heads=128,seq=2048,vocab=51200"
LARGEST = "layers=128,hidden=25600,heads=160,seq=2048,vocab=51200"
PUBLISHED = {
    "530 B, selective": (
        LARGE, 2240, 280,
        "tp=8,pp=35,dp=8,schedule=interleaved,chunks=3,recompute=selective,sequence_parallel=true",
        0.542,
    ),
    "530 B, full": (
        LARGE, 2240, 280, "tp=8,pp=35,dp=8,schedule=interleaved,chunks=3,recompute=full", 0.421,
    ),
    "1 T, full": (
        LARGEST, 3072, 384, "tp=8,pp=64,dp=6,recompute=full", 163 / 312 * 3 / 4,
    ),
}  # fmt: skip
TOLERANCE = 0.15
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture
def planned(command):
    """Plan, and return what is printed as JSON."""
    return lambda *words: json.loads(command.output("plan", "--json", *words))


@pytest.mark.parametrize(
    "name", [next(iter(PUBLISHED)), *(pytest.param(n, marks=EXHAUSTIVE) for n in [*PUBLISHED][1:])]
)
def test_published_steps_are_predicted(planned, name):
    sizes, batch, hosts, layout, published = PUBLISHED[name]
    where = ("--hardware", "a100-80gb", "--hosts", str(hosts))
    layout = f"{layout},micro_batch=1,precision=fp16"
    found = planned("--gpt", sizes, "--batch", str(batch), *where, "--layout", layout)
    assert found["mfu"] == pytest.approx(published, rel=TOLERANCE)
    assert found["peak_bytes"] < 80 * 2**30  # they ran
    assert set(found["sent"]) == {"tp", "dp", "pp"}


@pytest.mark.exhaustive
def test_a_search_returns_layouts_that_predict_the_same(planned):
    best, *others = planned(*SMALL, *HOST)
    # A simpler layout is first where another one promises hardly more.
    assert all(best["step_seconds"] <= 1.14 * other["step_seconds"] for other in others)
    assert planned(*SMALL, *HOST, "--layout", best["layout"]) == best


def test_methods_have_a_column_where_they_are_allowed(command):
    slow = ("plan", *SMALL, "--hardware", "a100-80gb", "--hosts", "2", "--devices-per-host", "1",
            "--link-between", "1MB/s")  # fmt: skip
    exact = command.output(*slow)
    assert "(class)" not in exact
    assert "links" not in exact
    for text in ("layouts tried", "left out: ", "strategy:\n  name: "):
        assert text in exact
    allowed = command.output(*slow, "--allow", "theory")
    assert "(class)" in allowed
    assert "(theory)" in allowed
    section = yaml.safe_load(allowed.partition("the first one as a configuration:")[2])
    assert section["links"]["far"]["gradients"] != "exact"


def test_shared_keys_and_layouts_of_the_same_numbers_are_said_once():
    numbers = {"tokens_per_second": 1, "mfu": 0.5, "idle": 0.0, "needed": lambda: 2}
    numbers |= {"leaving": 0, "planned": SimpleNamespace(methods=lambda: "exact")}
    found = SimpleNamespace(
        best=[
            SimpleNamespace(layout=layout, step_seconds=step, against=lambda _: "", **numbers)
            for layout, step in (("tp=1,pp=1", 1), ("tp=1,pp=2", 1), ("tp=1,pp=4", 2))
        ]
    )
    common, rows = found_rows(found, [])
    assert common == "tp=1"
    assert [(row[0], row[-1]) for row in rows] == [("pp=1", "and 1 more alike"), ("pp=4", "")]


def test_a_step_is_written_as_a_trace(command, tmp_path):
    layout = ("--layout", "pp=2,tp=2,micro_batch=2", "--trace", "step.json")
    out = command.output("plan", *SMALL, *HOST, *layout)
    assert "step " in out
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert any(event["name"].startswith("send ") for event in events)


def test_more_memory_is_needed_without_recomputation(planned):
    keys = "tp=2,micro_batch=2,data_parallel=zero1,recompute="
    none, selective, full = (
        planned(*SMALL, *HOST, "--layout", keys + each)["peak_bytes"]
        for each in ("none", "selective", "full")
    )
    assert none > full
    assert none > selective


def test_rounds_that_are_not_played_go_on_as_the_last_one(monkeypatch):
    for layout in (
        "pp=4,micro_batch=1",
        "pp=4,micro_batch=1,schedule=gpipe",
        "pp=2,tp=2,micro_batch=1,schedule=interleaved,chunks=2,data_parallel=zero2",
        "micro_batch=1,data_parallel=fsdp",
    ):
        few = predict.Predictor(EIGHT).predict(read_layout(layout))
        with monkeypatch.context() as patch:
            patch.setattr(predict, "ROUNDS", 1000)
            every = predict.Predictor(EIGHT).predict(read_layout(layout))
        assert len(few.played.tasks) < len(every.played.tasks), layout
        assert few.step_seconds == pytest.approx(every.step_seconds, rel=1e-3), layout
        assert few.peak_bytes == pytest.approx(every.peak_bytes, rel=1e-3), layout
        assert dict(few.sent) == pytest.approx(dict(every.sent)), layout


def test_bounds_are_never_above_the_prediction():
    for layout in (
        "pp=2,micro_batch=1,recompute=full",
        "tp=2,pp=2,sequence_parallel=true,micro_batch=2",
        "pp=2,chunks=2,schedule=interleaved,micro_batch=1",
        "micro_batch=1,data_parallel=fsdp",
        "micro_batch=1,data_parallel=zero2",
        "micro_batch=1",
    ):
        predictor, planned = predict.Predictor(EIGHT), read_layout(layout)
        bound, found = predictor.bound(planned), predictor.predict(planned)
        assert 0.5 * found.step_seconds < bound.seconds <= found.step_seconds * (1 + 1e-9), layout
        assert 0.5 * found.peak_bytes < bound.nbytes <= found.peak_bytes * (1 + 1e-9), layout


def test_bad_input_is_one_clear_line(command):
    usual = SMALL + HOST
    for arguments, expected in (
        (("--layout", "tp=3"), "multiple of tp x pp"),
        (("--layout", "tp=8,dp=2"), "expected dp=1, which 8 ranks leave beside"),
        (("--layout", "micro_batch=3"), "a --batch that dp x micro_batch = 8 x 3 divides"),
        (("--layout", "pp=8,chunks=4,schedule=interleaved"), "as many stages as the model has"),
        (("--layout", "tpp=2"), "unknown key 'tpp'; known: "),
        (("--layout", "data_parallel=fsdp,shard_group=3"), "groups that divide the 8 ranks"),
        (("--layout", "data_parallel=zero3,shard_group=8"), "with such a key, fsdp, found"),
        (("--layout", "tp"), "expected KEY=VALUE"),
        (("--layout", "tp=2,tp=4"), "found tp twice"),
        (("--layout", "data_parallel=megatron"), "which holds one itself"),
        (("--layout", "recompute=half"), "expected recompute of none, selective, full"),
        (("--layout", "precision=fp4"), "expected precision of"),
        (("--hardware", "t4", "--layout", "precision=bf16"), "that t4 computes in, fp16, no"),
        (("--hardware", "t4"), "a precision that t4 computes in, fp16, no"),
        (("--link-between", "fast"), "expected a rate such as 100GB/s"),
        (("--hardware", "a100"), "did you mean"),
        (("--gpt", "layers=2,hidden=64"), "expected heads, seq as well"),
        (("--gpt", "layers=2,hidden=64,heads=3,seq=8"), "heads that divide 64, found 3"),
        (("--gpt", "layers=x,hidden=64,heads=2,seq=8"), "a whole number for layers"),
    ):
        options = dict(zip(usual[::2], usual[1::2], strict=True))
        options |= dict(zip(arguments[::2], arguments[1::2], strict=True))
        err = command.error("plan", *chain(*options.items()))
        assert expected in err, arguments


def test_a_rate_between_hosts_is_reached_in_part():
    for rate, gigabytes in (("4GB/s", 4.0), ("8 Gbit/s", 1.0)):
        found = _with_link(H100, rate).links
        assert found.between.gigabytes_per_second == pytest.approx(gigabytes * found.reached), rate
        assert found.reached < 1, rate


def test_a_model_that_fits_nowhere_says_by_how_much(command):
    large = ("--gpt", "layers=8,hidden=40960,heads=8,seq=2048", "--batch", "2")
    err = command.error("plan", *large, *HOST[:-1], "2")
    assert "no layout fits: the smallest, " in err
    assert "too much; take 4 hosts (with a batch of 8: " in err


def test_every_layout_of_a_search_is_played_or_left_out_for_a_reason():
    task = predict.Task(GptShape(layers=2, hidden=256, heads=4, seq=64), 16, H100, 1, 2)
    found = search(task, "bf16")
    assert found.tried == len(found.best) + sum(found.left_out.values())
    assert "are slower, by their bound, than the best" in found.left_out


def test_a_configuration_has_the_hosts_and_the_dtypes_of_its_layout():
    task = predict.Task(GptShape(layers=2, hidden=256, heads=4, seq=64), 48, H100, 2, 8)
    for name, dtypes in (("ddp", None), ("zero2", {"param": "bf16"})):  # ddp keeps no masters
        planned = read_layout(f"data_parallel={name},precision=bf16")
        values = yaml.safe_load(file_of(task, SimpleNamespace(planned=planned, micro_batches=3)))
        assert (values["accumulation"], values.get("dtypes")) == (3, dtypes)
        assert values["launch"] == {"nproc_per_node": 8, "nnodes": 2}


def test_heads_that_do_not_divide_are_named():
    assert read_layout("tp=2,pp=1").strategy == "megatron"
    assert read_layout("tp=1,pp=1,data_parallel=zero1").strategy == "zero1"
    layout = read_layout("tp=8")
    units = GptShape(layers=2, hidden=48, heads=4, seq=8).units(1, "none", fused=True)
    with pytest.raises(ConfigError, match="tp that divides the 4 heads"):
        run = SimulatedRun({"tp": 8, "dp": 1, "pp": 1}, 1, "bf16")
        layout.kind.planning().simulate(layout.config, units, run)


def test_every_description_names_its_sources(command):
    listed = command.output("hardware", "show").splitlines()
    assert [line.split()[0] for line in listed] == hardware_names()
    for name in hardware_names():
        out = command.output("hardware", "show", name)
        assert out == hardware_text(name), name
        facts = load_hardware(name)
        assert facts.name == name, name
        assert facts.links.inside.source, name


def test_a_wrong_description_is_refused(command, tmp_path):
    text = hardware_text("h100").replace("processors: 132", "processors: none")
    (tmp_path / "mine.yaml").write_text(text)
    err = command.error("hardware", "show", "mine.yaml")
    assert "device.products.processors" in err


# --- models that are looked at ---

TRAIN = """
import sys
import torch
from drivetrain import Accelerator
width = int(sys.argv[1])
rows = torch.utils.data.TensorDataset(torch.ones(64, width), torch.zeros(64).long())
loader = torch.utils.data.DataLoader(rows, batch_size=4)
layers = (torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(2))
model = torch.nn.Sequential(*layers)
print("a line of the script")
accelerator = Accelerator(cpu=True)
accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
raise SystemExit("a script is left where it prepares")
"""


def test_a_config_of_transformers_is_planned_without_weights(planned, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    layout = ("--layout", "tp=2,pp=2,micro_batch=2,sequence_parallel=true")
    sizes = "layers=4,hidden=64,heads=4,kv_heads=2,seq=128,vocab=512,ffn=160,gated=true,tied=false"
    one, other = (
        planned(*model, "--hardware", "h100", "--batch", "32", *layout)
        for model in (("--hf", "."), ("--gpt", sizes))
    )
    assert one["sent"]["pp"] == pytest.approx(other["sent"]["pp"])
    assert one["sent"]["tp"] == pytest.approx(other["sent"]["tp"], rel=0.02)
    assert sum(one["held"].values()) == pytest.approx(sum(other["held"].values()), rel=0.15)


def test_a_script_is_planned_as_it_reaches_prepare(command, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    layout = ("--hardware", "cpu", "--devices-per-host", "2", "--layout", "precision=no")
    code, out, err = command("plan", *layout, "--json", "train.py", "16")
    assert code == 0, err
    found = json.loads(out)
    assert "a line of the script" in err
    assert found["held"]["parameters"] == 4 * 2 * (16 * 16 + 16)
    assert found["layout"] == "precision=no,data_parallel=ddp,dp=2"
    # One batch of the loader on each rank: eight samples, each of them one token.
    assert found["tokens_per_second"] == pytest.approx(2 * 4 / found["step_seconds"])


def test_a_function_makes_the_model(command, planned, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def make():\n    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))\n"
        "def words():\n    return nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64))\n"
    )
    where = ("--hardware", "h100", "--batch", "64", "--layout", "data_parallel=zero2", "--model")
    held = planned(*where, "mine:make")["held"]
    assert held["parameters"] == 2 * (8 * 16 + 16 + 16 * 4 + 4)
    assert "give --seq" in command.error("plan", *where, "mine:words")
    planned(*where, "mine:words", "--seq", "16")


def test_a_model_that_cannot_be_had_is_one_clear_line(command, tmp_path):
    for arguments, expected in (
        ((), "expected one of --gpt, --hf, --model, a script, found none"),
        (("--gpt", "layers=2", "--hf", "config.json"), "found --gpt and --hf"),
        (("--hf", "nowhere.json"), "found no file 'nowhere.json'"),
        (("--model", "nothing"), "expected MODULE:FUNCTION, found 'nothing'"),
        (("--seq", "8", "train.py"), "found a script, which says it itself"),
        (("missing.py",), "found no file 'missing.py'"),
        (("ends.py",), "expected accelerator.prepare(model), found a script without it"),
        (("fails.py",), "found before it ZeroDivisionError"),
    ):
        (tmp_path / "ends.py").write_text("x = 1\n")
        (tmp_path / "fails.py").write_text("1 / 0\n")
        err = command.error("plan", "--hardware", "h100", "--batch", "8", *arguments)
        assert expected in err, arguments


# --- one layout in detail ---


def test_the_parts_of_a_step_add_up():
    for layout in (
        "micro_batch=1,data_parallel=fsdp",
        "pp=4,micro_batch=1,recompute=full",
        "tp=2,pp=2,micro_batch=1,sequence_parallel=true,data_parallel=zero1",
    ):
        found = predict.Predictor(EIGHT).predict(read_layout(layout))
        assert sum(found.parts.values()) == pytest.approx(found.step_seconds, rel=1e-6), layout
        assert min(found.parts.values()) >= 0, layout
        if "pp" in layout:
            assert found.parts["other stages"] > 0, layout
        if "tp" in layout:
            assert found.parts["messages over tp"] > 0, layout
        assert found.tokens_per_second == pytest.approx(64 * 64 / found.step_seconds), layout
        cell = predict.DOUBT_OF_CELLS if "pp" in layout else 1.0
        for stored, doubt in (([], cell), ([{"host": 1.0}], predict.DOUBT_OF_STORES * cell)):
            judged = predict.judged(replace(found, stored=stored))
            assert judged == pytest.approx(doubt * found.step_seconds), layout
    few, many = (
        predict.Predictor(EIGHT).predict(read_layout(f"pp=4,micro_batch={rows}")) for rows in (8, 1)
    )
    assert few.idle > many.idle
    quick, slow = sorted((few, many), key=lambda each: each.step_seconds)
    assert (slow.against(quick)[0], quick.against(slow)[0]) == ("+", "-")
    for name, reserved in (("h100", predict.RESERVED_GIB), ("cpu", 0)):
        task = replace(EIGHT, hardware=load_hardware(name))
        assert predict.room_of(task) == (task.hardware.device.memory.gib - reserved) * 2**30


def test_a_layout_is_explained_with_what_would_make_it_fit(command, tmp_path):
    large = ("--gpt", "layers=48,hidden=8192,heads=64,seq=2048", "--batch", "16")
    layout = "tp=8,micro_batch=2"
    code, out, err = command("plan", *large, *HOST, "--explain", layout, "--trace", "t.json")
    assert code == 0, err
    assert "%" in out
    assert "  products" in out
    assert " too much" in out
    (line,) = [line for line in out.splitlines() if line.startswith("would fit with any of: ")]
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    for change in line.removeprefix("would fit with any of: ").split("; "):
        if "hosts" not in change:
            keys = {**dict(p.split("=") for p in layout.split(",")),
                    **dict(p.split("=") for p in change.split(","))}  # fmt: skip
            text = ",".join(f"{key}={value}" for key, value in keys.items())
            out = command.output("plan", *large, *HOST, "--layout", text)
            assert " too much" not in out
    assert "hosts (with a batch of" in line


def test_the_file_of_a_layout_launches(command, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    layout = ("--layout", "micro_batch=4,recompute=full,precision=no,data_parallel=zero2")
    where = ("--hardware", "cpu", "--devices-per-host", "2", "--batch", "16", *layout)
    command.output("plan", *where, "--output", "best.yaml", "train.py", "8")
    assert "precision: 'no'" in (tmp_path / "best.yaml").read_text()
    out = command.output("launch", "--cpu", "--config", "best.yaml", "--dry-run", "train.py")
    rows = [line.split()[:2] for line in out.splitlines()]
    for row in (["strategy.name", "zero2"], ["accumulation", "2"], ["Mesh:", "dp=2"]):
        assert row in rows


def test_options_of_one_layout_are_checked(command):
    for arguments, expected in (
        (("--layout", "tp=2", "--explain", "tp=2"), "one of --layout and --explain, found both"),
        (("--trace", "t.json"), "--trace: expected with --layout or --explain"),
        (("--layout", "tp=2", "--write", "no/where.yaml"), "cannot write 'no/where.yaml'"),
    ):
        err = command.error("plan", *TINY, *HOST, *arguments)
        assert expected in err, arguments


def test_unmeasured_links_between_hosts_are_not_used(command, tmp_path):
    text = hardware_text("h100").replace("InfiniBand adapters", "NOT MEASURED: adapters")
    (tmp_path / "mine.yaml").write_text(text)
    where = ("--hardware", "mine.yaml", "--hosts", "2", "--layout", "micro_batch=1")
    err = command.error("plan", *SMALL, *where)
    assert "links between hosts were not measured" in err
    command.output("plan", *SMALL, *where, "--link-between", "25GB/s")


LLAMA_8B = LLAMA | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
    "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_hidden_layers": 80,
}  # fmt: skip


@pytest.mark.exhaustive  # half a minute each
@pytest.mark.parametrize(
    ("config", "parameters", "batch", "hosts"),
    [(LLAMA_8B, 8.03e9, 128, 1), (LLAMA_70B, 70.6e9, 512, 8)],
)
def test_llama_gets_layouts_that_an_expert_would_take(
    planned, tmp_path, config, parameters, batch, hosts
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    where = ("--batch", str(batch), "--hardware", "h100", "--hosts", str(hosts))
    best = planned("--hf", "config.json", *where)[0]
    keys = dict(part.split("=") for part in best["layout"].split(","))
    assert 0.4 < best["mfu"] < 0.6
    assert 6 * parameters * batch * 4096 / best["step_seconds"] > 0.35 * 989e12 * 8 * hosts
    assert int(keys.get("tp", 1)) <= 8  # inside of a host
    assert keys["data_parallel"] != "ddp"  # optimizer states are divided
    assert keys["recompute"] == "none"
    # 8 B fits without a cell; 70 B does not.
    assert (int(keys.get("tp", 1)) * int(keys.get("pp", 1)) > 1) == (hosts > 1)


def words_of(out):
    """Return the lines of an output, with single spaces."""
    return [" ".join(line.split()) for line in out.splitlines()]


def test_a_dry_run_shows_ranks_and_links_of_several_hosts(command):
    where = ("--cpu", "--nproc-per-node", "2", "--nnodes", "2", "--rdzv-endpoint", "a:1")
    options = ("--strategy", "megatron", "--set", "strategy.tp=2")
    out = command.output("launch", "--dry-run", *where, *options)
    lines = words_of(out)
    assert "host 0 0, 1" in lines
    assert "host 1 2, 3" in lines
    # Each of the two ranks of a host has a partner on the other host.
    assert "all_reduce over dp between hosts 1.9 GiB 3.7 GiB" in lines
    assert "activations over tp inside of a host depends on the batch 0 B" in lines
    out = command.output("launch", "--dry-run", *where)
    lines = words_of(out)
    # Rings in two levels: a host sends 2 (H-1)/H of the gradients once, its ranks half of it each.
    assert "all_gather over dp.far between hosts 953.7 MiB 1.9 GiB" in lines
    out = command.output("launch", "--dry-run", "--cpu", "--nproc-per-node", "2")
    assert "Links, in a step" not in out
