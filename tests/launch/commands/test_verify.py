"""``drivetrain verify``: right numbers pass, wrong ones are named, and so is what cannot be run."""

import json
import os
import signal

import pytest
import torch

from drivetrain.verify import RunRecord, StepRecord
from drivetrain_launch import verification
from drivetrain_launch.verification import Attempt, Examination, exit_code_of, show_findings
from forked_programs import Started, run_python
from waits import wait_until

SCRIPT = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Accelerator

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 10)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
ids = torch.randint(10, (16, 5))
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(TensorDataset(ids), batch_size=2, shuffle=True)
)
for epoch in range(100):
    for (rows,) in loader:
        with accelerator.accumulate(model):
            output = model(rows)
            loss = nn.functional.cross_entropy(output.flatten(0, 1), rows.roll(1, 1).flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
raise AssertionError("the script goes on after the last step")
"""

WRONG = """
from dataclasses import replace

from drivetrain_plain.strategy import Plain

class Scaled(Plain):
    '''Takes one gradient for a little more than it is.'''

    def _mean(self, parameter):
        mean = super()._mean(parameter)
        if parameter is self.model.blocks[1].up.weight:
            mean.mul_(1.01)
        return mean

class Swapped(Plain):
    '''Puts the halves of a parameter back in the wrong order.'''

    def bind(self, optimizer):
        self.closing.callback(optimizer.register_step_post_hook(self._swap).remove)
        return super().bind(optimizer)

    def _swap(self, *arguments):
        weight = self.model.blocks[0].down.weight.data
        weight.copy_(weight.roll(2, 0))

    def prepare(self, model, optimizers):
        prepared = super().prepare(model, optimizers)
        facts = self.state.facts
        self.state.facts = lambda *of: [replace(f, where="shard of two ranks") for f in facts(*of)]
        return prepared
"""

CPU = ("--cpu", "--nproc-per-node", "2")


@pytest.fixture
def verify(sandbox):
    """Verify a script in the sandbox; the strategies of WRONG are installed there."""
    sandbox.script(WRONG, "wrong.py")
    sandbox.install("wrong", {"scaled": "Scaled", "swapped": "Swapped"})

    def run(*options, script=SCRIPT, code=0):
        path = sandbox.script(script)
        env = sandbox.environment({"PYTHONPATH": str(sandbox.folder)})
        words = ("-m", "drivetrain_launch", "verify", *CPU, *options, path)
        done = run_python(*words, folder=sandbox.folder, env=env)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


@pytest.mark.exhaustive
def test_masks_of_its_own_are_taken_away_in_the_repetition(verify):
    done = verify("--strategy", "megatron", "--set", "strategy.pp=2", "--steps", "2", "--json")
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["result"] == "rounding"
    assert finding["mesh"] == {"tp": 1, "dp": 1, "pp": 2}
    assert finding["largest"]["loss"] > 1e-4 > 1e-12 > finding["largest_in_fp64"]["loss"]
    assert finding["remarks"] == [
        "repeated without its 2 dropouts, whose masks are this strategy's own"
    ]


def test_a_gradient_that_is_too_large_is_named(verify):
    done = verify("--strategy", "scaled", "--steps", "1", code=1)
    assert "\nerror\n  first: step 1, gradient norm of blocks.1.up.weight: found " in done.stdout
    runs = ["run", "reference-dp2", "reference-dp2-fp64", "run-scaled-fp64"]
    assert done.stderr.splitlines() == [f"{name}, on 2 ranks" for name in runs]


@pytest.mark.exhaustive
def test_weights_in_the_wrong_order_are_named_with_their_place(verify):
    done = verify("--strategy", "swapped", "--steps", "1", "--json", code=1)
    (finding,) = json.loads(done.stdout)["findings"]
    first = finding["first"]
    assert finding["errors"] == 1
    place = ("weight", "blocks.0.down.weight", "shard of two ranks")
    assert (first["kind"], first["name"], first["where"]) == place
    assert first["of_change"] > 1


@pytest.mark.exhaustive
def test_every_strategy_is_in_the_table(verify):
    done = verify("--strategy", "all", code=1)
    _, _, *rows, _ = done.stdout.splitlines()
    verdicts = {" ".join(row.split("  ")[1:2]): row for row in rows}
    right = ["ddp", "fsdp", "megatron pp=2", "megatron tp=2", "offload optimizer=cpu"]
    assert set(verdicts) == {*right, "scaled", "swapped", "zero1", "zero2", "zero3"}
    for name, row in verdicts.items():
        assert ("  error  " in row) == (name in ("scaled", "swapped")), row
        assert "refused" not in row, row


@pytest.mark.exhaustive
def test_a_script_that_draws_data_by_rank_is_to_blame_itself(verify):
    drawn = "            output = model((rows + time.time_ns()) % 10)"
    script = SCRIPT.replace("            output = model(rows)", drawn)
    done = verify("--steps", "1", script=script, code=8)
    assert done.stdout.startswith("not compared: expected the same batches in both runs, found ")
    assert "seed it" in done.stdout


@pytest.mark.exhaustive
def test_what_cannot_be_compared_is_shown_with_its_reason(verify):
    done = verify(script="def deep():\n    raise ValueError('no corpus')\n\ndeep()\n", code=1)
    assert "ValueError: no corpus" in done.stderr
    assert done.stdout == "failed: ValueError: no corpus\n"
    script = SCRIPT.replace("(gradient", "(mixed_precision='bf16', gradient")
    done = verify("--set", "dtypes.param=bf16", "--set", "precision=bf16", script=script, code=2)
    assert done.stdout.startswith("refused: ddp: expected dtypes.param as the model is given")
    for script, lacks in (
        ("print('hello')", "an Accelerator()"),
        ("from drivetrain import Accelerator\nAccelerator()", "accelerator.prepare(model)"),
    ):
        done = verify(script=script, code=8)
        assert done.stdout == f"not compared: the script ended without {lacks}\n"


def test_the_reason_of_a_failure_is_the_first_ranks_last_words():
    late = "drivetrain.errors.UsageError: of another rank"
    for said, ending, reason in (
        ("Traceback:\n  deep()\nValueError: no corpus\n\n", "failed", "ValueError: no corpus"),
        ("error: no\n  strategy", "refused", "no strategy"),
        ("drivetrain.errors.CollectiveError: lost\nKilled", "failed", "Killed"),
        ("", "failed", "exit code 3"),
    ):
        for output in (said, f"error: of a start before\nrank 1 failed first (3)\n{said}"):
            for rest in ("", "\nstopped with it: rank 0\n", f"\nstopped with it: rank 0\n{late}\n"):
                found = verification._failed(output + rest if said else said, 3)
                assert (found.ending, found.reason, found.code) == (ending, reason, 3)


class Recorded:
    """Runs of a script that were recorded before.

    Args:
        run: weights after one step of the run as it is.
        cleared: backwards of which the reference lost the gradients.
    """

    def __init__(self, run=1.0, cleared=0):
        self._run, self._cleared = run, cleared

    def run(self, name, ranks, request):
        lost = self._cleared if request.reference else 0
        step = StepRecord(losses=((1.0,) * 4,) * 2, batches=(("a",),) * 2, cleared=lost)
        weight = 1.0 if request.reference or request.doubles else self._run
        states = [{"weight": torch.tensor([value])} for value in (0.99, weight)]
        mesh = {"dp": 2}
        record = RunRecord(strategy="zero2", mesh=mesh, models=1, steps=[step], states=states)
        return Attempt(ending="recorded", record=record)


def test_the_report_tells_what_the_reference_and_fp64_do_alike(capsys):
    assert Examination(Recorded(), 2).finding("").remarks == []

    finding = Examination(Recorded(cleared=6), 2).finding("")
    assert finding.result == "equal"
    assert finding.remarks == [
        "step 1: gradients of 6 of 8 backwards were cleared inside of their window, in the "
        "reference, too; the step is without them"
    ]

    finding = Examination(Recorded(run=0.35), 2).finding("")
    assert finding.result == "error"
    assert finding.remarks == [
        "right in fp64, but further apart here than low dtypes and such steps explain"
    ]
    show_findings([finding])
    assert capsys.readouterr().out.count("0e+00") == 3  # in fp64

    equal = Examination(Recorded(), 2).finding("")
    for ending, prefix, result, codes in (
        ("refused", "", "refused", (3, 0)),
        ("refused", "the run of the reference: ", "failed", (3, 1)),
        ("failed", "", "failed", (3, 1)),
        ("hung", "", "hung", (3, 1)),
        ("empty", "", "incomparable", (8, 8)),
    ):
        attempt = Attempt(ending=ending, reason="so", code=0 if ending == "empty" else 3)
        found = verification._without_record("", attempt, prefix)
        assert (found.result, found.reason) == (result, f"{prefix}so")
        assert (exit_code_of([found], False), exit_code_of([equal, found], True)) == codes
    assert (exit_code_of([finding], False), exit_code_of([equal], False)) == (1, 0)


@pytest.mark.exhaustive
def test_a_script_that_hangs_is_ended(sandbox):
    script = sandbox.script("import time\ntime.sleep(600)")
    done = sandbox.run("verify", *CPU, "--limit", "6", script, code=5)
    assert done.stdout.startswith("hung: no end after 6 s")


def test_a_signal_ends_it_and_leaves_no_folder(sandbox):
    script = sandbox.script("import time\nopen('begun', 'w').close()\ntime.sleep(600)")
    words = ("-m", "drivetrain_launch", "verify", *CPU, script)
    with Started(*words, folder=sandbox.folder, env=sandbox.environment()) as process:
        wait_until((sandbox.folder / "begun").exists, "begun")
        os.kill(process.pid, signal.SIGTERM)
        done = process.wait()
    assert "stopped by SIGTERM" in done.stderr
    assert done.returncode == 128 + signal.SIGTERM


def test_wrong_command_lines(command, tmp_path):
    for arguments, message in (
        (("train.py",), "cannot run the script 'train.py': no such file"),
        ((), "expected a SCRIPT or -m MODULE"),
        (("--strategy", "ddq", "train.py"), "unknown strategy 'ddq'; did you mean 'ddp'?"),
        (("--steps", "0", "train.py"), "0 is not in the range x>=1"),
        (("--set", "launch.nnodes=2", "train.py"), "expected 1 with drivetrain verify, found 2"),
    ):
        err = command.error("verify", *arguments)
        assert message in err, arguments
    (tmp_path / "train.py").write_text("")
    err = command.error("verify", "--keep", str(tmp_path), "train.py")
    assert f"--keep: expected a folder that can be made, found '{tmp_path}'" in err


AS_ACCELERATE = """
import torch
from torch import nn
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
torch.manual_seed(accelerator.process_index)
while True:
    accelerator.backward(model(torch.randn(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.exhaustive
def test_script_for_accelerate_is_verified_as_it_is(verify):
    done = verify("--as-accelerate", "--steps", "2", "--json", script=AS_ACCELERATE)
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["steps"], finding["mesh"]) == (2, {"dp": 2})
