"""``drivetrain plan`` and ``drivetrain hardware``: published measurements, and bad input."""

import json

import pytest

from drivetrain.errors import ConfigError
from drivetrain.hardware.catalog import hardware_names, hardware_text, load_hardware
from drivetrain.paper.run import PaperRun
from drivetrain.paper.transformer import GptShape
from drivetrain_launch.planner import predict
from drivetrain_launch.planner.layout import read_layout

SMALL = ("--gpt", "layers=4,hidden=1024,heads=16,seq=1024", "--batch", "16")
H100 = load_hardware("h100")
HOST = ("--hardware", "a100-80gb", "--hosts", "1", "--devices-per-host", "8")

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


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_steps_are_predicted(command, name):
    sizes, batch, hosts, layout, published = PUBLISHED[name]
    code, out, err = command(
        "plan", "--gpt", sizes, "--batch", str(batch), "--hardware", "a100-80gb",
        "--hosts", str(hosts), "--layout", f"{layout},micro_batch=1,precision=fp16", "--json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert found["mfu"] == pytest.approx(published, rel=TOLERANCE)
    assert found["peak_bytes"] < 80 * 2**30  # they ran
    assert set(found["sent"]) == {"tp", "dp", "pp"}


def test_a_search_returns_layouts_that_predict_the_same(command):
    code, out, err = command("plan", *SMALL, *HOST, "--json")
    assert code == 0, err
    best, *others = json.loads(out)
    assert all(best["step_seconds"] <= other["step_seconds"] for other in others)
    code, out, err = command("plan", *SMALL, *HOST, "--layout", best["layout"], "--json")
    assert code == 0, err
    assert json.loads(out) == best


def test_the_table_says_what_was_left_out_and_ends_with_the_yaml(command):
    code, out, err = command("plan", *SMALL, *HOST)
    assert code == 0, err
    assert "layouts tried" in out
    assert "left out: " in out
    assert "strategy:\n  name: " in out


def test_a_step_is_written_as_a_trace(command, tmp_path):
    layout = ("--layout", "pp=2,tp=2,micro_batch=2", "--trace", "step.json")
    code, out, err = command("plan", *SMALL, *HOST, *layout)
    assert code == 0, err
    assert "step " in out
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert any(event["name"].startswith("send ") for event in events)


def test_more_memory_is_needed_without_recomputation(command):
    peaks = []
    for recompute in ("none", "selective", "full"):
        keys = f"tp=2,micro_batch=2,recompute={recompute},data_parallel=zero1"
        code, out, err = command("plan", *SMALL, *HOST, "--layout", keys, "--json")
        assert code == 0, err
        peaks.append(json.loads(out)["peak_bytes"])
    assert peaks[0] > peaks[2]
    assert peaks[0] > peaks[1]


@pytest.mark.parametrize(
    "layout",
    [
        "pp=4,micro_batch=1",
        "pp=4,micro_batch=1,schedule=gpipe",
        "pp=2,tp=2,micro_batch=1,schedule=interleaved,chunks=2,data_parallel=zero2",
        "micro_batch=1,data_parallel=fsdp",
    ],
)
def test_rounds_that_are_not_played_go_on_as_the_last_one(monkeypatch, layout):
    task = predict.Task(GptShape(layers=8, hidden=256, heads=4, seq=64), 64, H100, 1, 8)
    few = predict.Predictor(task).predict(read_layout(layout))
    monkeypatch.setattr(predict, "ROUNDS", 1000)
    every = predict.Predictor(task).predict(read_layout(layout))
    assert len(few.played.tasks) < len(every.played.tasks)
    assert few.step_seconds == pytest.approx(every.step_seconds, rel=1e-3)
    assert few.peak_bytes == pytest.approx(every.peak_bytes, rel=1e-3)
    assert dict(few.sent) == pytest.approx(dict(every.sent))


@pytest.mark.parametrize(
    "layout",
    [
        "pp=2,micro_batch=1,recompute=full",
        "tp=2,pp=2,sequence_parallel=true,micro_batch=2",
        "pp=2,chunks=2,schedule=interleaved,micro_batch=1",
        "micro_batch=1,data_parallel=fsdp",
        "micro_batch=1,data_parallel=zero2",
        "micro_batch=1",
    ],
)
def test_bounds_are_never_above_the_prediction(layout):
    task = predict.Task(GptShape(layers=8, hidden=256, heads=4, seq=64), 64, H100, 1, 8)
    predictor, planned = predict.Predictor(task), read_layout(layout)
    bound, found = predictor.bound(planned), predictor.predict(planned)
    assert 0.5 * found.step_seconds < bound.seconds <= found.step_seconds * (1 + 1e-9)
    assert 0.5 * found.peak_bytes < bound.nbytes <= found.peak_bytes * (1 + 1e-9)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--layout", "tp=3"), "multiple of tp x pp"),
        (("--layout", "tp=8,dp=2"), "expected dp=1, which 8 ranks leave beside"),
        (("--layout", "micro_batch=3"), "a --batch that dp x micro_batch = 8 x 3 divides"),
        (("--layout", "pp=8,chunks=4,schedule=interleaved"), "as many stages as the model has"),
        (("--layout", "tpp=2"), "unknown key 'tpp'; known: "),
        (("--layout", "tp"), "expected KEY=VALUE"),
        (("--layout", "tp=2,tp=4"), "found tp twice"),
        (("--layout", "data_parallel=megatron"), "which holds one itself"),
        (("--layout", "recompute=half"), "expected recompute of none, selective, full"),
        (("--layout", "precision=fp8"), "expected a precision of"),
        (("--hardware", "t4", "--layout", "precision=bf16"), "that t4 computes in, fp16, no"),
        (("--hardware", "t4"), "--precision that t4 computes in, fp16, no"),
        (("--link-between", "fast"), "expected a rate such as 100GB/s"),
        (("--hardware", "a100"), "did you mean"),
        (("--gpt", "layers=2,hidden=64"), "expected heads, seq as well"),
        (("--gpt", "layers=2,hidden=64,heads=3,seq=8"), "heads that divide 64, found 3"),
        (("--gpt", "layers=x,hidden=64,heads=2,seq=8"), "a whole number for layers"),
    ],
)
def test_bad_input_is_one_clear_line(command, arguments, expected):
    code, _, err = command("plan", *SMALL, *HOST, *arguments)
    assert code == ConfigError.exit_code
    assert expected in err


def test_a_model_that_fits_nowhere_says_by_how_much(command):
    large = "layers=96,hidden=12288,heads=96,seq=2048"
    code, _, err = command("plan", "--gpt", large, "--batch", "8", *HOST)
    assert code == ConfigError.exit_code
    assert "no layout fits: the smallest, " in err
    assert "too much; take more hosts (5, " in err


def test_heads_that_do_not_divide_are_named():
    layout = read_layout("tp=8")
    units = GptShape(layers=2, hidden=48, heads=4, seq=8).units(1, "none", fused=True)
    with pytest.raises(ConfigError, match="tp that divides the 4 heads"):
        layout.kind.step(layout.config, units, PaperRun({"tp": 8, "dp": 1, "pp": 1}, 1, "bf16"))


@pytest.mark.parametrize("name", hardware_names())
def test_every_description_names_its_sources(command, name):
    code, out, err = command("hardware", "show", name)
    assert code == 0, err
    assert out == hardware_text(name)
    facts = load_hardware(name)
    assert facts.name == name
    assert facts.links.inside.source


def test_names_are_listed(command):
    code, out, _ = command("hardware", "show")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == hardware_names()


def test_a_wrong_description_is_refused(command, tmp_path):
    text = hardware_text("h100").replace("processors: 132", "processors: none")
    (tmp_path / "mine.yaml").write_text(text)
    code, _, err = command("hardware", "show", "mine.yaml")
    assert code == ConfigError.exit_code
    assert "device.products.processors" in err
