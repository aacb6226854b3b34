"""``drivetrain estimate``: promises of all strategies in one table, as a run keeps them."""

import json
import sys

import pytest

from drivetrain import Accelerator
from drivetrain_launch.forecast import of_size
from foreign_files import LLAMA

SCRIPT = """
import sys
import torch
from drivetrain import Accelerator
model = torch.nn.Linear(int(sys.argv[1]), 1000, bias=False)
optimizer = torch.optim.AdamW(model.parameters())
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, optimizer)
raise SystemExit("a script is left where it prepares")
"""


def table(out):
    """Return the cells of each row by the name of the strategy."""
    lines = [line.split() for line in out.splitlines()[2:]]
    return {line[0]: line[1:] for line in lines if len(line) > 8}


def test_every_strategy_has_a_row_with_its_bytes(command):
    out = command.output("estimate", "--nproc-per-node", "4", "--hardware", "a100", "8B")
    rows = table(out)
    assert {"ddp", "zero1", "zero2", "zero3", "fsdp", "megatron", "offload", "toy"} <= set(rows)
    # 8e9 fp32 elements are 29.8 GiB; Adam keeps two more of each.
    assert rows["ddp"][:5] == ["119.21", "29.80", "0.00", "29.80", "59.60"]
    assert rows["ddp"][-1] == "no"
    assert rows["zero3"][1] == "7.45"
    assert rows["zero3"][-1] == "yes"
    # Optimizer states and a share of the gradients wait in host memory, with a buffer for the bus.
    assert rows["offload"][-4:-2] == ["29.84", "0.00"]
    command.output("config", "--default", "--output", "run.yaml")
    where = ("--config", "run.yaml", "--nproc-per-node", "4", "--hardware", "a100-80gb", "--json")
    found = json.loads(command.output("estimate", *where, "8B"))
    plain = {each["strategy"]: each for each in found}
    assert plain["zero1"]["held"]["optimizer"] == pytest.approx(8 * 8 * 10**9 / 4)
    assert [plain[name]["fits"] for name in ("ddp (as configured)", "zero3")] == [False, True]


def test_several_hosts_show_the_bytes_that_leave_a_host(command):
    words = ("--nproc-per-node", "4", "--nnodes", "2")  # on either side of the model
    out = command.output("estimate", "1B", *words)
    rows = [line.split() for line in out.splitlines()]
    (whole,) = [row for row in rows if row[:1] == ["ddp"] and row[1] != "hook"]
    (hybrid,) = [row for row in rows if row[:3] == ["fsdp", "sharding", "hybrid"]]
    # One ring over all ranks: 2 x 7/8 of 3.7 GiB. Four rings over two hosts: 4 x 2 x 1/2 x 1/4.
    assert (whole[-1], hybrid[-1]) == ("6.52", "3.73")
    assert "leaves host: bytes that all ranks of a host send" in out


def test_model_of_transformers_is_built_without_values(command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for source in ("config.json", "."):
        out = command.output("estimate", "--ranks", "2", source)
        assert out.startswith("238,144 parameters, 2 ranks, precision no: MiB that rank 0 holds")
        assert table(out)["ddp"][:2] == ["3.63", "0.91"]  # four and one times 238,144 fp32
        assert "megatron tp 2: sends activations over tp as well" in out


def test_script_runs_until_it_prepares_its_model(command, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    prepare, words = Accelerator.prepare, [*sys.argv]
    code, out, err = command("estimate", "--ranks", "2", "train.py", "2000", "--hardware", "t4")
    assert code == 0
    assert "--hardware stands after the script, which gets it as its own argument" in err
    assert out.startswith("2,000,000 parameters")
    assert Accelerator.prepare is prepare
    assert sys.argv == words


def test_a_number_of_parameters_is_kept_to_the_last_one():
    for count in (7, 1_234_567, 7 * 10**9 + 5, 8_000_000_123):
        assert sum(spec.numel for spec in of_size(count).parameters) == count, count


def test_function_of_a_module(command, tmp_path):
    (tmp_path / "nets.py").write_text("from torch import nn\ndef net(): return nn.Linear(9, 10)\n")
    out = command.output("estimate", "--ranks", "2", "nets:net")
    assert out.startswith("100 parameters")


def test_configuration_decides_the_dtypes_and_adds_its_form(command):
    out = command.output(
        "estimate", "--ranks", "2", "--set", "precision=bf16", "--set", "dtypes.param=bf16",
        "--set", "strategy={name: zero3, offload: {optimizer: cpu, params: cpu}}", "1B",
    )  # fmt: skip
    assert "ddp: ddp: expected dtypes.param as the model is given" in out
    (line,) = [line for line in out.splitlines() if "zero3 (as configured)" in line]
    assert float(line.split()[3]) < 0.1  # all of it lies in host memory
    assert table(out)["zero2"][1] == "1.86"


def test_bad_source_is_one_clear_line(command, tmp_path):
    for arguments, message in (
        (["nowhere.json"], "found 'nowhere.json'; check the path"),
        (["meta/llama-7b"], "as nothing is downloaded, give the config.json of meta/llama-7b"),
        (["broken.py"], "broken.py:2: expected accelerator.prepare(model), found before it KeyE"),
        (["--hardware", "abacus", "7B"], "--hardware: expected a number of GiB or one of t4,"),
        (["7B", "--ranks", "3", "2"], "found arguments after '7B': --ranks 3 2; only a script"),
        (["7B", "--ranks", f"{10**20}"], "expected at most 131,072 ranks, found 100,000,000,000"),
        (["facts.json"], "expected a configuration of transformers with a model_type"),
        (["idle.py"], "expected accelerator.prepare(model), found a script without it"),
        (["--device", "0", "7B"], "--hardware: expected a number of GiB or one of t4,"),
        (["unknown.json"], "unknown.json: transformers cannot build this model: "),
        (["torch.nn:Nothing"], "cannot find torch.nn:Nothing"),
        (["os:getcwd"], "expected a torch.nn.Module, found str"),
    ):
        (tmp_path / "facts.json").write_text('{"lr": 1}')
        (tmp_path / "idle.py").write_text("")
        (tmp_path / "broken.py").write_text("facts = {}\nfacts['size']\n")
        (tmp_path / "unknown.json").write_text('{"model_type": "no-such-model"}')
        err = command.error("estimate", *arguments)
        assert message in err, arguments


def test_hosts_share_the_ranks_and_hybrid_shards_stay_inside(command):
    hybrid = "strategy={name: fsdp, sharding: hybrid}"
    out = command.output("estimate", "--ranks", "8", "--nnodes", "2", "--set", hybrid, "1B")
    assert out.startswith("1,000,000,000 parameters, 8 ranks on 2 hosts")
    (line,) = [line for line in out.splitlines() if "fsdp (as configured)" in line]
    # 1e9 fp32 elements over the 4 ranks of a host.
    assert line.split()[4] == "0.93"
    (over_all,) = [line.split() for line in out.splitlines() if line.startswith("  fsdp  ")]
    assert over_all[2] == "0.47"
    assert "fsdp sharding hybrid" not in out  # no second time
    code, _, err = command("estimate", "--ranks", "8", "--nnodes", "3", "1B")
    assert (code, err) == (
        2,
        "error: --ranks: expected a multiple of the 3 hosts, found 8; every host has as many "
        "ranks, --nproc-per-node\n",
    )
