"""The work of modules: as closed forms say, on all ranks as in one process, without a trace."""

import json
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, ProfileKwargs
from drivetrain.communication import broadcast_object_list
from drivetrain.hardware.description import published_peak
from drivetrain.observe.modules import (
    FlopCounter,
    ModelSizes,
    ModuleTracker,
    ModuleWork,
    RankWork,
    StepWork,
)
from said import said
from stacks import Parts, Stack

STRATEGIES = {
    "zero3": {"name": "zero3", "keep_below": 0},
    "tp": {"name": "megatron", "tp": 2},
    "fsdp": "fsdp",
    "pp": {"name": "megatron", "pp": 2, "micro_batches": 2},
}
BATCH, SEQ, WIDTH, HEADS, WORDS = 4, 8, 16, 2, 32


def attention(fused):
    def compute(m, x):
        parts = m.qkv(x).view(*x.shape[:2], -1, 3, WIDTH // HEADS).transpose(1, 2).unbind(3)
        if fused:
            mixed = nn.functional.scaled_dot_product_attention(*parts)
        else:
            q, k, v = parts
            mixed = (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v
        return m.out(mixed.transpose(1, 2).flatten(2))

    return Parts(compute, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH))


def attend(m, x):
    x = x + m.attention(m.norm(x))
    return x + m.down(torch.relu(m.up(x)))


def block(fused=False):
    ends = {"up": nn.Linear(WIDTH, 4 * WIDTH), "down": nn.Linear(4 * WIDTH, WIDTH)}
    return Parts(attend, norm=nn.LayerNorm(WIDTH), attention=attention(fused), **ends)


class Net(Stack):
    def __init__(self):
        first, last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        super().__init__((block() for _ in range(4)), first=first, last=last)
        self.example_inputs = (torch.zeros(2, SEQ, dtype=torch.long),) * 2

    def forward(self, x, y):
        logits = super().forward(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())}


@contextmanager
def counting(model):
    """Yield the counts of what runs inside, by (phase, module); whole when it is over."""
    found = Counter()
    trail = ModuleTracker({"M": model}, lambda place: None)
    with FlopCounter(lambda: trail.place) as counter:
        yield found
    trail.close()
    found.update({tuple(place): count for place, count in counter.counts.items()})


# --- closed forms ---


def test_layers_count_as_on_paper():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7))
    with counting(model) as found:
        model(torch.randn(11, 3)).sum().backward()
    first, last = 2 * 11 * 3 * 5, 2 * 11 * 5 * 7
    assert found == {
        ("forward", "M.0"): first,
        ("forward", "M.2"): last,
        ("backward", "M.0"): first,  # nobody wants the gradient of its input
        ("backward", "M.2"): 2 * last,
    }

    trail = ModuleTracker({"M": model}, lambda place: None)
    for hook in (lambda gradient: 1 / 0, lambda gradient: None):  # a backward fails, and the next
        hidden = model[0](torch.randn(11, 3))
        hidden.register_hook(hook)
        with suppress(ZeroDivisionError):
            model[2](hidden).sum().backward()
    assert trail.place == ("forward", "")
    trail.close()

    for fused in (False, True):
        model = block(fused)
        with counting(model) as found:
            model(torch.randn(BATCH, SEQ, WIDTH, requires_grad=True)).sum().backward()
        rows = BATCH * SEQ
        layers = {"attention.qkv": 3, "attention.out": 1, "up": 4, "down": 4}
        forward = {f"M.{name}": 2 * rows * WIDTH * part * WIDTH for name, part in layers.items()}
        attention = 2 * 2 * BATCH * SEQ * SEQ * WIDTH  # scores, and their product with the values
        assert found.pop(("forward", "M.attention")) == attention
        # A fused kernel computes the scores once more: five products instead of two.
        assert found.pop(("backward", "M.attention")) == attention * (2.5 if fused else 2)
        assert found == {
            **{("forward", name): count for name, count in forward.items()},
            **{("backward", name): 2 * count for name, count in forward.items()},
        }
        assert sum(forward.values()) == 24 * rows * WIDTH**2

    def branches(m, x):
        h = m.a(x)
        return m.a(h) * m.b(h) + h @ m.b.weight

    model = Parts(branches, a=nn.Linear(6, 6), b=nn.Linear(6, 6, bias=False))
    with counting(model) as found:
        model(torch.randn(5, 6, requires_grad=True)).sum().backward()
    one = 2 * 5 * 6 * 6
    assert found == {
        ("forward", "M"): one,
        ("forward", "M.a"): 2 * one,
        ("forward", "M.b"): one,
        ("backward", "M"): 2 * one,
        ("backward", "M.a"): 4 * one,
        ("backward", "M.b"): 2 * one,
    }


def test_a_compiled_module_counts_as_one_and_is_not_compiled_again():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = nn.Sequential(block(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(BATCH, SEQ, WIDTH)
    with counting(model[0]) as inside:
        model[0](x)
    model[0].compile(backend=backend)
    expected = model(x)
    before = len(compiled)
    with counting(model) as found:
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    last = 2 * BATCH * SEQ * WIDTH**2
    assert found == {("forward", "M.0"): sum(inside.values()), ("forward", "M.1"): last}
    model(x)
    assert len(compiled) == before == 1
    torch._dynamo.reset()


def test_a_module_whose_forward_fails_is_left():
    model = nn.Sequential(nn.Linear(2, 2))
    trail = ModuleTracker({"M": model}, lambda place: None)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, 3))
    assert trail.place == ("forward", "")
    trail.close()


def test_parameters_and_rates_are_those_of_a_module_and_a_rank():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    sizes = ModelSizes()
    sizes.add(model)
    names = ("Sequential", "Sequential.0", "Sequential.1")
    assert sizes.by_module() == dict.fromkeys(names, 9)

    modules = {"M": ModuleWork({"forward": 4 * 10**12}, {"forward": 1.0})}
    ranks = [RankWork(rank, "CPU", 2.0, modules, {}) for rank in range(2)]
    assert "takes 2000.0 ms: 2 TFLOP/s of a rank" in StepWork(ranks, {}, None, "").table()


# --- a run ---


def run(folder, strategy, profile, steps=4, recompute="none"):
    """Train; return losses, weights, bytes sent and the number of hooks."""
    accelerator = Accelerator(
        cpu=True,
        strategy=strategy,
        config={
            "profile": {"dir": f"{folder}/out", **profile} if profile else {},
            "recompute": {"mode": recompute},
            "data": {"split_batches": True},
        },
    )
    torch.manual_seed(0)
    model = Net()
    words = torch.randint(WORDS, (steps * BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(list(words), batch_size=BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for rows in loader:
        loss = model(rows, rows)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    hooks = len(model.blocks[0]._forward_hooks)
    sent = accelerator.traffic.sent()
    state = accelerator.get_state_dict(model)
    accelerator._profiler.end()
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return losses, state, sent, hooks


def one_process():
    """Return the counts of a step in one process, by (phase, module)."""
    torch.manual_seed(0)
    model = Net()
    rows = torch.zeros(BATCH, SEQ, dtype=torch.long)
    with counting(model) as found:
        model(rows, rows)["loss"].backward()
    return {(phase, name.replace("M", "Net", 1)): count for (phase, name), count in found.items()}


def summed(folder, ranks=2):
    found = Counter()
    for rank in range(ranks):
        for name, work in json.loads((folder / f"modules_{rank}.json").read_text())["own"].items():
            found.update({(phase, name): count for phase, count in work["flops"].items()})
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_ranks_together_do_the_work_of_one_process(strategy, tmp_path):
    folder = Path(broadcast_object_list([str(tmp_path)])[0])
    losses, state, *rest = run(folder, strategy, {})
    with said("drivetrain.observe") as lines:
        found = run(folder, strategy, {"steps": ":1", "peak_teraflops": 0.001})
    assert found[0] == losses
    assert all(torch.equal(state[name], found[1][name]) for name in state)
    assert list(found[2:]) == rest, "bytes, or a hook is left"
    if torch.distributed.get_rank():
        return
    assert summed(folder / "out") == one_process()
    merged = json.loads((folder / "out/modules.json").read_text())
    root = merged["modules"]["Net"]
    assert sum(root["flops"].values()) == sum(one_process().values())
    assert root["parameters"] == sum(each.numel() for each in Net().parameters())
    assert 0 < sum(root["seconds"].values()) < 2 * 1.05 * merged["seconds"]
    assert root["share_of_peak"] == pytest.approx(root["flops_per_second"] / 1e9)
    assert merged["modules"]["Net.blocks.3.up"]["seconds"]["backward"] > 0
    (printed,) = [line for line in lines if "floating point operations" in line]
    assert "Net.blocks.*.attention.qkv" in printed
    assert "the peak of 0.001 TFLOP/s is that of profile.peak_teraflops" in printed
    tree = [line.split()[-1] for line in (folder / "out/modules.txt").read_text().splitlines()[3:]]
    assert tree[:5] == ["Net", "blocks", "0", "attention", "out"]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_forwards_have_a_column_of_their_own(mode, tmp_path):
    with said("drivetrain.observe") as lines:  # here modules are left out
        plain = run(tmp_path / "plain", "ddp", {"steps": ":1", "modules": False}, recompute=mode)
    assert not [line for line in lines if "floating point" in line or "not measured" in line]
    assert not (tmp_path / "plain/out/modules.txt").exists()
    with said("drivetrain.observe") as lines:
        found = run(tmp_path, "ddp", {"steps": ":1"}, recompute=mode)
    assert found[0] == plain[0]
    (printed,) = [line for line in lines if "floating point operations" in line]
    assert "no published peak is known for CPU in fp32" in printed
    assert json.loads((tmp_path / "out/modules.json").read_text())["peak"] is None
    counts = summed(tmp_path / "out", 1)
    again = {name: count for (phase, name), count in counts.items() if phase == "again"}
    rest = {key: count for key, count in counts.items() if key[0] != "again"}
    assert rest == one_process()
    inside = {name for _, name in rest if ".blocks." in name}
    if mode == "full":
        assert set(again) <= inside
        assert again["Net.blocks.2.up"] == rest["forward", "Net.blocks.2.up"]
    else:  # results of linear layers are kept, and those of products that are written out are not
        assert set(again) == {name for name in inside if name.endswith("attention")}


@pytest.mark.parametrize("steps", ["2:4", "2:3"])
def test_a_run_that_ends_before_says_so(steps, tmp_path):
    with said("drivetrain.observe") as lines:
        run(tmp_path, "ddp", {"steps": steps})
    assert len([line for line in lines if "the work of modules was not measured" in line]) == 1
    assert not (tmp_path / "out/modules.txt").exists()
    assert (tmp_path / "out/trace.json.gz").exists()
    first, last = map(int, steps.split(":"))
    assert json.loads((tmp_path / "out/costs.json").read_text())["steps"] == last - first


def test_a_profile_of_the_script_measures_the_two_steps_after_it(tmp_path):
    class Tied(Net):
        """Has a product in its own code."""

        def forward(self, x, y):
            return {"loss": (self.first(x) @ self.first.weight.t()).square().mean()}

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Tied())
    accelerator.free_memory()
    model, optimizer = (net := Tied()), torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = torch.zeros(BATCH, SEQ, dtype=torch.long)

    def steps(count):
        for _ in range(count):
            accelerator.backward(model(rows, rows)["loss"])
            optimizer.step()

    with accelerator.profile(ProfileKwargs(output_trace_dir=tmp_path, with_flops=True)):
        steps(1)
    steps(2)
    assert not (tmp_path / "modules.txt").exists()
    model(rows, rows)  # here the second of them is over
    product = 2 * BATCH * SEQ * WIDTH * WORDS
    assert summed(tmp_path, 1) == {("forward", "Tied"): product, ("backward", "Tied"): 2 * product}
    merged = json.loads((tmp_path / "modules.json").read_text())
    assert merged["modules"]["Tied"]["parameters"] == sum(each.numel() for each in net.parameters())


# --- peaks ---


def test_the_catalog_has_the_peaks_of_devices_by_name_and_dtype(monkeypatch):
    for device, dtype, teraflops in (
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA A100-SXM4-40GB", torch.float16, 312),
        ("NVIDIA A100 80GB PCIe", torch.float32, 19.5),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, None),
        ("NVIDIA H100 NVL", torch.bfloat16, None),
        ("NVIDIA H200", torch.float64, None),
    ):
        found = published_peak(device, dtype)
        assert (found and found.operations_per_second) == (teraflops and teraflops * 1e12)
        assert found is None or "sheet" in found.source
    assert published_peak("NVIDIA H200", torch.float32) is not None
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert published_peak("NVIDIA H200", torch.float32) is None, "products may be in tf32"
