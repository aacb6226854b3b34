"""Products in fp8: which layers, their numbers, and that strategies train them as one process."""

import copy
import importlib.util
import os
import sys
from collections import Counter, namedtuple
from dataclasses import make_dataclass, replace

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain import Accelerator, AORecipeKwargs
from drivetrain.config.outline import check_forward
from drivetrain.config.schema import RecomputeConfig, RunConfig
from drivetrain.cost import ModelSpec, Traffic
from drivetrain.data.examples import Candidate
from drivetrain.errors import ConfigError, UsageError
from drivetrain.hardware.description import load_hardware
from drivetrain.model import fp8
from drivetrain.model.fp8 import choose_layers, compute_in_fp8, restore_products
from drivetrain.planner.layout import read_layout
from drivetrain.planner.search import Predictor, Task
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.simulator.traced import traced_model
from drivetrain.strategy import Run
from stacks import Residual, Stack

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(
    not HAS_TORCHAO, reason="torchao is not installed: drivetrain[fp8]"
)

CPU = torch.device("cpu")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Block(Residual):
    """Two layers that can compute in fp8, and one that cannot: 10 is no multiple of 16."""

    def __init__(self):
        super().__init__(32)
        self.odd = nn.Linear(32, 10)

    def forward(self, x):
        return super().forward(x) + self.odd(x).mean(-1, keepdim=True)


class Blocks(Stack):
    def __init__(self):
        torch.manual_seed(0)
        first, last = nn.Linear(16, 32), nn.Linear(32, 16)
        super().__init__((Block() for _ in range(3)), first=first, last=last)


def batch(step, rank):
    torch.manual_seed(100 * step + rank)
    return torch.randn(5, 16)  # 5 rows: no multiple of 16


def loss_of(model, inputs):
    return model(inputs).float().square().mean()


def named(model):
    trained = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
    return {name: each.detach().clone() for name, each in trained}


def check_trains_as_one_process(strategy, config, make=Blocks):
    """Scales belong to a micro-batch, so the one process takes those of all ranks one by one.

    A pipeline cuts batches: the same numbers only where scales belong to rows.
    """
    kwargs = {"mixed_precision": "fp8", "config": config, "cpu": True}
    accelerator = Accelerator(strategy=strategy, **kwargs)
    model, alone, in_bf16 = make(), make(), make()
    start = named(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    others = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (alone, in_bf16)]
    compute_in_fp8(alone, config.get("dtypes", {}).get("fp8", "tensorwise"), CPU)
    axis = accelerator.mesh["dp"]
    for step in range(3):
        accelerator.backward(loss_of(model, batch(step, axis.rank)))
        for rank in range(axis.size):
            for each in (alone, in_bf16):
                with torch.autocast("cpu", torch.bfloat16):
                    (loss_of(each, batch(step, rank)) / axis.size).backward()
        for each in (optimizer, *others):
            each.step()
            each.zero_grad()
    found = accelerator.get_state_dict(model)
    assert {value.dtype for value in found.values()} == {torch.float32}

    def apart(wanted):
        """Return the largest distance of a parameter, as a share of its way."""
        return max((found[n] - v).norm() / (v - start[n]).norm() for n, v in named(wanted).items())

    assert apart(alone) < (0.03 if "pp" in strategy else 1e-5)  # bf16 rounds what stages exchange
    assert apart(in_bf16) > 0.06
    accelerator.free_memory()


@needs_torchao
@pytest.mark.parametrize(
    ("strategy", "config"),
    [
        ("zero3", {"recompute": {"mode": "full"}}),
        ("fsdp", {"dtypes": {"fp8": "rowwise"}}),
        ("fsdp", {"dtypes": {"fp8": "tensorwise_gathered"}}),
        ({"name": "megatron", "pp": 2}, {"dtypes": {"fp8": "rowwise_with_gw_hp"}}),
        ("ddp", {}),
        ("zero2", {}),
    ],
    ids=["zero3", "fsdp", "fsdp-gathered", "pp", "ddp", "zero2"],
)
@pytest.mark.ranks(2)
def test_trains_as_one_process_that_takes_the_same_micro_batches(strategy, config):
    check_trains_as_one_process(strategy, config)


def adapted():
    """Return a model whose layers in fp8 are frozen, inside of adapters of peft."""
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    return peft.get_peft_model(Blocks(), config)  # random like the model: its seed is set there


@needs_torchao
@pytest.mark.parametrize(
    ("strategy", "config"),
    [
        ({"name": "zero3", "keep_below": 0}, {"recompute": {"mode": "full"}}),
        ("fsdp", {"dtypes": {"fp8": "rowwise"}}),
        ("ddp", {"dtypes": {"fp8": "rowwise_with_gw_hp"}}),
    ],
    ids=["zero3", "fsdp", "ddp"],
)
@pytest.mark.ranks(2)
def test_adapted_models_train_as_one_process(strategy, config):
    check_trains_as_one_process(strategy, config, adapted)


class Uneven(Blocks):
    """Weights of all magnitudes: zeros, below the least that is scaled by, and large."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.blocks[0].up.weight.zero_()
            self.blocks[0].down.weight.mul_(1e-13)
            self.blocks[1].up.weight.mul_(1e-11)
            self.blocks[1].down.weight[:, 3:] *= 1e-3
            self.blocks[2].up.weight.mul_(1e4)


class Tied(Uneven):
    """A weight of a product is a table, too, whose rows are read as they are."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.table.weight = self.blocks[1].up.weight

    def forward(self, x):
        return super().forward(x) + self.table(torch.arange(len(x))).mean(-1, keepdim=True)


def frozen_in_part():
    model = Uneven()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    return model


def with_weight_in_fp8(layer, compute, args, kwargs):
    """Stands for a product where there is no torchao: with the weight as torchao casts it."""
    values = layer.weight.detach()
    scale = (448 / values.abs().max().double().clamp(min=1e-12)).float()
    cast = (values.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
    for_gradients = F.linear(*args, layer.weight - values)  # zeros
    return F.linear(*args, cast, layer.bias) + for_gradients


def trained(recipe, strategy, config, make, folder):
    """Train some windows, whose weights change between steps too; return what they computed.

    All values, and the bytes of gathers in the last window, which are those of ``cost()``.
    """
    dtypes = {**config.get("dtypes", {}), "fp8": recipe}
    accelerator = Accelerator(
        strategy=strategy, mixed_precision="fp8", config={**config, "dtypes": dtypes}, cpu=True
    )
    spec, model = ModelSpec.of(make()), make()
    parameters = [each for each in model.parameters() if each.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(parameters, lr=0.01))
    unit, rank, found = model.blocks[1], accelerator.mesh["dp"].rank, []
    for step in range(4):
        before = Counter(accelerator.traffic.sent())
        for i in range(accelerator.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                loss = loss_of(model, batch(10 * step + i, rank))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
        sent = Counter(accelerator.traffic.sent()) - before
        if step == 1:
            accelerator.save_state(folder)
            with accelerator.gathered(model):
                found.append(unit.up.weight.detach().clone())  # not those of bytes
                unit.down.weight.data.mul_(3)
        if step == 2:
            with torch.no_grad():
                for group in optimizer.optimizer.param_groups:
                    for fragment in group["params"]:
                        fragment.mul_(1.5)
                found.append(model(batch(0, rank)))
    promised = type(strategy := accelerator.strategy_of(model)).cost(
        strategy.config, spec, strategy.run
    )
    assert sent == promised.sent
    found += accelerator.get_state_dict(model).values()
    accelerator.load_state(folder)
    with torch.no_grad():
        found.append(model(batch(0, rank)))
    accelerator.free_memory()
    return found, sum(count for (_, what), count in sent.items() if what == "all_gather")


def check_gathers_change_nothing(folder, strategy, config, make=Uneven):
    """Bit for bit; and say by which factor they have fewer bytes."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_TORCHAO:
            patch.setattr(fp8, "_products", lambda recipe, device, config: with_weight_in_fp8)
        (wanted, all_bytes), (found, fewer) = (
            trained(recipe, strategy, config, make, folder / recipe)
            for recipe in ("tensorwise", "tensorwise_gathered")
        )
    torch.testing.assert_close([*wanted], [*found], rtol=0, atol=0)
    return fewer / all_bytes


ALL_DIVIDED = {"name": "zero3", "keep_below": 0}
BF16 = {"dtypes": {"param": "bf16"}}


@pytest.mark.parametrize(
    ("strategy", "config", "make"),
    [
        (ALL_DIVIDED, {**BF16, "accumulation": 2}, Tied),
        ({**ALL_DIVIDED, "reshard_after_forward": False, "prefetch": 2}, {}, frozen_in_part),
        ("fsdp", {**BF16, "recompute": {"mode": "full"}}, frozen_in_part),
        ({"name": "fsdp", "sharding": "grad"}, {"accumulation": 2}, Uneven),
    ],
    ids=["zero3", "zero3-kept", "fsdp", "fsdp-grad"],
)
@pytest.mark.ranks(2)
def test_gathers_in_fp8_change_no_bit_of_a_training(tmp_path, strategy, config, make):
    assert check_gathers_change_nothing(tmp_path, strategy, config, make) < 0.9


@pytest.mark.parametrize(
    ("strategy", "far", "why"),
    [
        ({**ALL_DIVIDED, "secondary": "host"}, {}, "secondary: host keeps them"),
        (ALL_DIVIDED, {"parameters": "int8"}, "links.far may approximate them"),
        ({**ALL_DIVIDED, "offload": {"optimizer": "cpu"}}, {}, "a store keeps them"),
        (ALL_DIVIDED, {"gradients": "int8"}, ""),
    ],
    ids=["secondary", "links", "store", "none"],
)
@pytest.mark.ranks(2)
def test_weights_are_gathered_as_others_where_fp8_does_not_fit(monkeypatch, strategy, far, why):
    monkeypatch.setenv("GROUP_RANK", os.environ["RANK"])  # as if each rank had a host
    monkeypatch.setattr(fp8, "_products", lambda recipe, device, config: with_weight_in_fp8)
    config = {"dtypes": {"fp8": "tensorwise_gathered"}, "links": {"far": far}}
    accelerator = Accelerator(strategy=strategy, mixed_precision="fp8", config=config, cpu=True)
    model = Blocks()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    strategy = accelerator.strategy_of(model)
    assert strategy.why_not_in_bytes(strategy.config, strategy.run) == why
    found = [unit.in_bytes is not None for unit in strategy.placement.units]
    assert sum(found) == (0 if why else 3)
    accelerator.backward(loss_of(model, batch(0, 0)))
    optimizer.step()
    accelerator.free_memory()


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (
            "rowwise",
            "0 weights are gathered in fp8: dtypes.fp8 is rowwise, whose scales need whole",
        ),
        ("tensorwise_gathered", "0 weights are gathered in fp8: one rank has them"),
    ],
)
def test_prepare_says_why_no_weight_is_gathered_in_fp8(monkeypatch, capsys, recipe, said):
    monkeypatch.setattr(fp8, "_products", lambda recipe, device, config: doubled)
    config = {"dtypes": {"fp8": recipe}}
    Accelerator(strategy="fsdp", mixed_precision="fp8", config=config, cpu=True).prepare(Blocks())
    assert said in capsys.readouterr().err


@pytest.mark.ranks(2)
def test_forwards_that_write_into_weights_are_refused_where_they_are_gathered_in_fp8(monkeypatch):
    monkeypatch.setattr(fp8, "_products", lambda recipe, device, config: with_weight_in_fp8)
    config = {"dtypes": {"fp8": "tensorwise_gathered"}}
    accelerator = Accelerator(strategy="fsdp", mixed_precision="fp8", config=config, cpu=True)
    model = Blocks()
    plain = model.blocks[0].forward

    def clamped(x):
        with torch.no_grad():
            model.blocks[0].up.weight.clamp_(-0.1, 0.1)
        return plain(x)

    model.blocks[0].forward = clamped
    model = accelerator.prepare(model)
    with pytest.raises(UsageError, match="those of fp8; take dtypes.fp8: tensorwise"):
        accelerator.backward(loss_of(model, batch(0, 0)))
    accelerator.free_memory()


@needs_torchao
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.ranks(2)
def test_compiled_blocks_have_no_other_graphs_with_gathers_in_fp8(tmp_path):
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drivetrain.model.modules.BACKEND", "aot_eager")
        both = []
        for recipe in ("tensorwise", "tensorwise_gathered"):
            torch._dynamo.utils.counters.clear()
            config = {**BF16, "compile": "blocks"}
            found, _ = trained(recipe, "fsdp", config, Uneven, tmp_path / recipe)
            both.append((found, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    torch._dynamo.reset()
    (wanted, graphs), (found, as_many) = both
    assert graphs == as_many == 2  # of training, and of evaluation
    assert all(map(torch.equal, wanted, found))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "strategy",
    [
        {**ALL_DIVIDED, "reshard_after_forward": 2},
        {"name": "fsdp", "sharding": "hybrid", "shard_size": 2},
    ],
    ids=["neighbors", "hybrid"],
)
@pytest.mark.ranks(4)
def test_gathers_in_fp8_of_groups_change_no_bit_of_a_training(tmp_path, strategy):
    assert check_gathers_change_nothing(tmp_path, strategy, BF16) < 0.9


@needs_torchao
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_compiled_blocks_multiply_in_fp8_in_one_graph():
    torch._dynamo.reset()
    config = {"compile": "blocks"}
    plain = Blocks()
    for block in plain.blocks:
        block.up.weight.requires_grad_(False)
    gradients = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drivetrain.model.modules.BACKEND", "aot_eager")
        for each in ({}, config):
            accelerator = Accelerator(mixed_precision="fp8", config=each, cpu=True)
            model = accelerator.prepare(copy.deepcopy(plain))
            torch._dynamo.utils.counters.clear()
            accelerator.backward(loss_of(model, batch(0, 0)))
            trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            gradients.append({name: p.grad.clone() for name, p in trained})
            made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            accelerator.free_memory()
    torch._dynamo.reset()
    assert made == 1
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function] += 1
        return function(*args, **(kwargs or {}))


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_layers_compute_the_same_without_gradients_of_their_weights(recipe):
    layer = Blocks().blocks[0].up
    flat = nn.Sequential(nn.Identity(), nn.Linear(16, 16), layer, nn.Linear(64, 16))
    compute_in_fp8(flat, recipe, CPU)
    found = []
    for frozen in (False, True):
        layer.weight.requires_grad_(not frozen)
        torch.manual_seed(1)
        inputs = torch.randn(3, 5, 32, requires_grad=True)
        with Products() as products, torch.autocast("cpu", torch.bfloat16):
            outputs = layer(inputs)
            (outputs.float() ** 3).sum().backward()
        assert products.calls[torch.ops.aten.mm.default] == (2 if frozen else 3)
        found.append((outputs, inputs.grad))
    for trained, same in zip(*found, strict=True):
        assert torch.equal(trained, same)


@needs_torchao
def test_outputs_have_the_dtype_of_autocast():
    model = Blocks()
    compute_in_fp8(model, "tensorwise", CPU)
    inputs = torch.randn(5, 32)
    assert model.blocks[0].up(input=inputs).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert model.blocks[0].up(inputs).dtype is torch.bfloat16


@needs_torchao
def test_recipes_differ_and_are_undone():
    model, inputs = Blocks(), batch(0, 0)
    exact = model(inputs)
    outputs = []
    for recipe in RECIPES[:2]:
        compute_in_fp8(model, recipe, CPU)
        outputs.append(model(inputs))
        torch.testing.assert_close(outputs[-1], exact, rtol=0.2, atol=0.2)
        copied = copy.deepcopy(model)
        assert torch.equal(copied(inputs), outputs[-1])
        restore_products(model)
        assert torch.equal(model(inputs), exact)
    assert not torch.equal(outputs[0], outputs[1])


def test_layers_are_chosen_in_blocks_and_the_reasons_of_others_are_said(monkeypatch, capsys):
    monkeypatch.setattr(fp8, "_products", lambda recipe, device, config: doubled)
    model = Blocks()
    model.blocks[0].down.requires_grad_(False)
    model.blocks[1].up.double()
    nn.utils.parametrizations.weight_norm(model.blocks[2].up)
    model.blocks[2].down.forward = model.blocks[0].down.forward
    chosen, left = choose_layers(model)
    assert set(chosen) == {"blocks.0.up", "blocks.0.down", "blocks.1.down"}
    assert left == {
        "first": "outside of the blocks",
        "last": "outside of the blocks",
        "blocks.1.up": "given in float64",
        **{f"blocks.2.{each}": "computes in a way of its own" for each in ("up", "down")},
        **{f"blocks.{i}.odd": "sizes are no multiples of 16" for i in range(3)},
    }
    flat = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 32), nn.Linear(32, 16))
    assert list(choose_layers(flat).chosen) == ["2"]
    assert set(choose_layers(flat, lambda layer, name: name != "2").chosen) == {"0", "3"}
    compute_in_fp8(model, "rowwise", CPU)
    told = capsys.readouterr().err
    assert "3 of 11 Linear layers of Blocks compute in fp8 (rowwise, emulated" in told
    assert "blocks.0.odd and 2 more (sizes are no multiples of 16)" in told


def doubled(module, compute, args, kwargs):
    """Stands for a product in fp8, where there is no torchao."""
    return 2 * compute(*args, **kwargs)


CASTS = ("input", "grad_output", "weight", "weight_for_grad_input")
LATER = ("input_for_grad_weight", "grad_output_for_grad_weight")


@pytest.mark.parametrize("frozen", [False, True])
def test_the_gradient_of_a_frozen_layers_inputs_is_a_product_of_its_own(frozen):
    """Stands without torchao: which casts each of its products is given."""
    names = [f"cast_config_{each}" for each in (*CASTS, *LATER)]
    config = make_dataclass("Config", names)(*CASTS, *LATER)
    calls = []

    def multiply(inputs, weight, operands, config):
        calls.append((operands.output, config.cast_config_input, config.cast_config_weight))
        return inputs @ weight

    operands = namedtuple("Operands", "output grad_input")("forward", "backward")
    layer = nn.Linear(16, 16).requires_grad_(not frozen)
    inputs = torch.randn(2, 16, requires_grad=True)
    products = fp8._Fp8Products(multiply, operands, config, "cpu")
    products(layer, layer.forward, (inputs,), {}).sum().backward()
    backward = [("backward", "grad_output", "weight_for_grad_input")] if frozen else []
    assert calls == [("forward", "input", "weight"), *backward]
    torch.testing.assert_close(inputs.grad, layer.weight.detach().sum(0).expand(2, 16))


def test_freed_models_compute_as_before(monkeypatch):
    monkeypatch.setattr(fp8, "_products", lambda recipe, device, config: doubled)
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    model, inputs = Blocks(), batch(0, 0)
    exact = model(inputs)
    prepared = accelerator.prepare(model)
    assert not torch.allclose(prepared(inputs), exact, rtol=0.1)
    accelerator.free_memory()
    assert torch.equal(model(inputs), exact)


@needs_torchao
def test_accelerates_object_chooses_recipe_and_layers():
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig.from_recipe_name("rowwise")
    handler = AORecipeKwargs(config, lambda layer, name: name.endswith("down"))
    outputs = []
    for handlers, dtypes in ([handler], {}), ([], {"dtypes": {"fp8": "rowwise"}}):
        accelerator = Accelerator(
            mixed_precision="fp8", kwargs_handlers=handlers, config=dtypes, cpu=True
        )
        assert accelerator.mixed_precision == "fp8"
        model = accelerator.prepare(Blocks())
        outputs.append(model(batch(0, 0)))
        accelerator.free_memory()
        assert torch.equal(model(batch(0, 0)), Blocks()(batch(0, 0)))
    assert not torch.equal(*outputs)  # the second has the layers up, too
    gathered = {"dtypes": {"fp8": "tensorwise_gathered"}}
    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[handler], config=gathered, cpu=True
    )
    with pytest.raises(UsageError, match=r"one scale for a tensor, .* found .*axiswise"):
        accelerator.prepare(Blocks())
    with pytest.raises(UsageError, match="enable_fsdp_float8_all_gather"):
        AORecipeKwargs(Float8LinearConfig(enable_fsdp_float8_all_gather=True))


def test_what_cannot_be_is_refused(monkeypatch):
    run = RunConfig(precision="fp8")
    check_forward(run, {"dp": 2, "pp": 2})
    with pytest.raises(ConfigError, match="that each rank holds whole, found tp: 2"):
        check_forward(run, {"tp": 2})
    selective = RunConfig(precision="fp8", recompute=RecomputeConfig(mode="selective"))
    with pytest.raises(ConfigError, match="found selective"):
        check_forward(selective, {})
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    with pytest.raises(UsageError, match=r"found none \(0: first or last\); take precision: bf16"):
        accelerator.prepare(nn.Sequential(nn.Linear(16, 16)))
    model = Blocks()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "L4")
    said = r"capability 9\.0 or newer .* rowwise, found L4 with 8\.9"
    with pytest.raises(UsageError, match=said):
        compute_in_fp8(model, "rowwise", torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UsageError, match="pip install 'drivetrain\\[fp8\\]'"):
        accelerator.prepare(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("strategy", "options"), [("fsdp", {}), ("zero3", {"keep_below": 40}), ("zero2", {})]
)
def test_plans_gather_the_bytes_that_cost_promises(strategy, options):
    """Two layers of a block cross in a byte for an element, and six numbers with them.

    A plan has the mean of the ranks, whose ranges of a unit may have other shares in fp8.
    """
    model = Blocks()
    paper = traced_model(model, [Candidate("rows", (batch(0, 0),), {})])
    predictor = Predictor(Task(paper, 10, load_hardware("cpu"), 1, 2))
    worlds = [World(rank=rank, size=2, local_size=2, hosts=("here", "here")) for rank in range(2)]
    planned = read_layout(f"data_parallel={strategy},micro_batch=5")
    planned = replace(planned, config=replace(planned.config, **options))
    spec, axes = ModelSpec.of(model, states=2), planned.kind.axes(planned.config, 2)
    saved = []
    for name in ("bf16", "fp8"):
        precision = Precision.of(name, param="bf16", recipe=fp8.GATHERED)
        promised = 0
        for world in worlds:
            mesh = Mesh.plan(axes, world)
            run = Run(
                world=world, mesh=mesh, precision=precision, accumulation=1, traffic=Traffic()
            )
            cost = planned.kind.cost(planned.config, spec, run)
            promised += cost.sent["dp", "all_gather"] / 2
        sent = predictor.predict(replace(planned, precision=name)).sent
        saved.append((promised, sent["dp", "all_gather"]))
        if strategy != "zero2" and name == "fp8":
            assert sent["dp", "all_reduce"] == 4 * 6
    (promised, drawn), (promised_fp8, drawn_fp8) = saved
    assert promised - promised_fp8 == drawn - drawn_fp8
    assert (promised == promised_fp8) == (strategy == "zero2")
