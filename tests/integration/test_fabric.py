"""A loop of Lightning Fabric trains under each strategy as it does on one process without one."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from drivetrain.errors import CheckpointError, UsageError
from trainers import BATCH, LENGTH, STEPS, STRATEGIES, WORDS, launched, tiny_llama

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.filterwarnings("ignore"),  # of Lightning, about itself
    pytest.mark.skipif(
        find_spec("lightning_fabric") is None,
        reason="Lightning Fabric is not installed; pip install drivetrain[fabric]",
    ),
]
HALF = STEPS // 2


def fabric_of(name: str, **options: Any) -> Any:
    """Return a launched Fabric."""
    from lightning_fabric import Fabric

    import drivetrain.integrations.fabric  # noqa: F401 - registers the name

    fabric = Fabric(**{"accelerator": "cpu", "devices": 1, "strategy": name} | options)
    fabric.launch()
    return fabric


def end(fabric: Any) -> None:
    fabric.strategy.engine.free_memory()


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(WORDS, (STEPS * BATCH, LENGTH), generator=generator))


class Loop:
    """A script of Fabric: each step has two micro-batches, and gradients are clipped."""

    def __init__(self, fabric: Any) -> None:
        self.fabric = fabric
        model = tiny_llama().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.schedule = StepLR(optimizer, 4, gamma=0.7)
        self.model, self.optimizer = fabric.setup(model, optimizer)
        data = getattr(fabric.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1}
        loader = DataLoader(rows(), batch_size=BATCH // 2 // data["num_replicas"])
        self.loader = fabric.setup_dataloaders(loader)
        self.seen: dict[str, Any] = {"step": 0, "norms": []}

    @property
    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "schedule", "seen")
        return {name: getattr(self, name) for name in names}

    def train(self, until: int) -> list[float]:
        """Return the loss of each step, the mean over the samples of all ranks."""
        losses = []
        begin = 2 * self.seen["step"]
        for number, words in enumerate(self.loader):
            if not begin <= number < 2 * until:
                continue
            with self.fabric.no_backward_sync(self.model, enabled=number % 2 == 0):
                logits = self.model(input_ids=words).logits
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten()) / 2
                self.fabric.backward(loss)
            losses.append(loss.detach().clone())
            if number % 2:
                norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
                self.seen["step"] += 1
                self.seen["norms"].append(norm.item())
        means = [self.fabric.all_reduce(each.clone(), reduce_op="mean").item() for each in losses]
        return [first + second for first, second in zip(means[::2], means[1::2], strict=True)]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """Losses, norms and weights of Fabric alone, on one process."""
    loop = Loop(fabric_of("auto"))
    losses = loop.train(STEPS)
    weights = {name: tensor.detach() for name, tensor in loop.model.state_dict().items()}
    return {"losses": losses, "norms": loop.seen["norms"], "weights": weights}


def strategies(*default: str) -> list[Any]:
    """Return all strategies; those beside the given run with --exhaustive alone."""
    return [
        pytest.param(name, marks=[] if name in default else pytest.mark.exhaustive)
        for name in STRATEGIES
    ]


@pytest.mark.parametrize("strategy", strategies("zero3", "pp"))
def test_a_loop_trains_saves_and_goes_on(strategy, plain, tmp_path, monkeypatch):
    launched(monkeypatch, tmp_path, strategy)
    loop = Loop(fabric_of("drivetrain"))
    losses = loop.train(HALF)
    loop.fabric.save(tmp_path / "half", loop.state)
    loop.train(HALF + 2)  # what is loaded below is another state than the one at hand
    rest = loop.fabric.load(tmp_path / "half", state := loop.state)
    assert rest == {}
    loop.seen = state["seen"]
    assert loop.seen["step"] == HALF
    losses += loop.train(STEPS)
    torch.testing.assert_close(losses, plain["losses"], rtol=1e-10, atol=0)
    torch.testing.assert_close(loop.seen["norms"], plain["norms"], rtol=1e-8, atol=0)
    whole = loop.fabric.strategy.get_module_state_dict(loop.model._forward_module)
    torch.testing.assert_close(whole, plain["weights"], rtol=1e-8, atol=1e-10)
    end(loop.fabric)


@pytest.mark.parametrize("strategy", strategies("fsdp"))
def test_weights_alone_are_a_file_as_fabric_writes_it(strategy, tmp_path, monkeypatch):
    launched(monkeypatch, tmp_path, strategy)
    fabric = fabric_of("drivetrain")
    model = fabric.setup(tiny_llama())
    fabric.save(tmp_path / "weights.ckpt", {"model": model, "epoch": 3})
    saved = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    torch.testing.assert_close(saved["model"], tiny_llama().state_dict(), rtol=0, atol=0)
    fabric.barrier()  # the first rank writes the file anew
    changed = {name: tensor + 1 for name, tensor in saved["model"].items()}
    if fabric.is_global_zero:
        torch.save({"model": changed, "epoch": 4}, tmp_path / "weights.ckpt")
    fabric.barrier()
    state = {"model": model, "epoch": 0}
    assert fabric.load(tmp_path / "weights.ckpt", state) == {}
    assert state["epoch"] == 4
    with pytest.raises(CheckpointError, match="found 1 missing or further ones, such as lm_head"):
        lacking = {k: v for k, v in changed.items() if k != "lm_head.weight"}
        fabric.strategy.load_module_state_dict(model._forward_module, lacking)
    found = fabric.strategy.get_module_state_dict(model._forward_module)
    expected = {name: tensor + 1 for name, tensor in tiny_llama().state_dict().items()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    end(fabric)


def test_words_among_the_ranks(tmp_path, monkeypatch):
    from lightning_fabric.utilities.rank_zero import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", None)  # as where no variable says it at import
    launched(monkeypatch, tmp_path, "ddp")
    fabric = fabric_of("drivetrain")
    rank = fabric.global_rank
    assert rank_zero_only.rank == rank
    assert (fabric.world_size, fabric.local_rank, fabric.is_global_zero) == (2, rank, rank == 0)
    assert fabric.all_gather(torch.tensor([rank, 5])).tolist() == [[0, 5], [1, 5]]
    assert fabric.all_reduce(torch.tensor(2.0 * rank), reduce_op="mean").item() == 1.0
    assert fabric.all_reduce(torch.tensor(2 * rank), reduce_op="max").item() == 2
    assert fabric.broadcast({"from": rank}, src=1) == {"from": 1}
    decide = fabric.strategy.reduce_boolean_decision
    assert decide(rank == 0, all=False)
    assert not decide(rank == 0)
    assert decide(True)
    mine = torch.tensor([float(rank + 1)], requires_grad=True)
    (fabric.all_gather(mine, sync_grads=True) * (rank + 1)).sum().backward()
    assert mine.grad.tolist() == [3.0]  # both ranks' losses follow from this tensor


def test_ranks_that_share_a_batch_count_once(tmp_path, monkeypatch):
    launched(monkeypatch, tmp_path, "tp")
    fabric = fabric_of("drivetrain")
    assert fabric.strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    assert fabric.all_gather(torch.ones(3)).shape == (3,)
    assert fabric.all_reduce(torch.ones(3), reduce_op="sum").tolist() == [1.0] * 3


@pytest.mark.ranks(1)
def test_a_checkpoint_holds_the_whole_run(tmp_path, monkeypatch):
    launched(monkeypatch, tmp_path, "ddp")
    loop = Loop(fabric_of("drivetrain"))
    save, load = loop.fabric.save, loop.fabric.load
    with pytest.raises(UsageError, match="all 1 models of setup"):
        save(tmp_path / "run", {"optimizer": loop.optimizer})
    with pytest.raises(UsageError, match="expected no filter"):
        save(tmp_path / "run", loop.state, filter={"model": lambda name, value: True})
    save(tmp_path / "run", loop.state)
    with pytest.raises(CheckpointError, match="use the same keys"):
        load(tmp_path / "run", {"net": loop.model, "optimizer": loop.optimizer})
    with pytest.raises(CheckpointError, match="expected 'epoch' in"):
        load(tmp_path / "run", loop.state | {"epoch": 1})
    assert load(tmp_path / "run", loop.state | {"epoch": 1}, strict=False) == {}
    state = {"model": loop.model, "optimizer": loop.optimizer}
    assert load(tmp_path / "run", state).keys() == {"schedule", "seen"}
    torch.save({"model": 1, "optimizer": 2}, tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match="expected a checkpoint directory for the state"):
        load(tmp_path / "plain.ckpt", state)


@pytest.mark.ranks(1)
def test_mixed_precision_is_the_engines(tmp_path, monkeypatch):
    launched(monkeypatch, tmp_path, "ddp")
    fabric = fabric_of("drivetrain", precision="bf16-mixed")
    assert fabric.strategy.engine.mixed_precision == "bf16"
    model = fabric.setup(torch.nn.Linear(2, 2))
    model.register_forward_hook(lambda *_: None)
    inner = []
    model._forward_module.weight.register_hook(lambda gradient: inner.append(gradient.dtype))
    fabric.backward(model(torch.ones(1, 2)).sum())
    assert inner == [torch.float32]
    with torch.no_grad():
        exact = F.linear(torch.full((1, 2), 1 / 3), model.weight, model.bias)
        assert not torch.equal(model(torch.full((1, 2), 1 / 3)), exact)


@pytest.mark.ranks(1)
def test_what_has_no_meaning_here_is_refused(tmp_path, monkeypatch):
    from lightning_fabric.plugins import TransformerEnginePrecision

    launched(monkeypatch, tmp_path, "ddp")
    with pytest.raises(UsageError, match="expected 2 ranks for the 2 devices of Fabric"):
        fabric_of("drivetrain", devices=2)
    with pytest.raises(UsageError, match="expected a precision of"):
        fabric_of("drivetrain").strategy.precision = TransformerEnginePrecision.__new__(
            TransformerEnginePrecision
        )
    loop = Loop(fabric_of("drivetrain"))
    with pytest.raises(UsageError, match="0-d loss"):
        loop.fabric.backward(torch.ones(2, requires_grad=True), torch.ones(2))
    launched(monkeypatch, tmp_path, "ddp", accumulation=4)
    with pytest.raises(UsageError, match="found accumulation: 4"):
        fabric_of("drivetrain")
    end(loop.fabric)


@pytest.mark.ranks(1)
def test_a_norm_that_is_no_number_is_an_error(tmp_path, monkeypatch):
    launched(monkeypatch, tmp_path, "ddp")
    fabric = fabric_of("drivetrain")
    net = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model(torch.full((1, 2), float("inf"))).sum())
    with pytest.raises(RuntimeError, match="expected a finite norm of gradients"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    options = {"max_norm": 1.0, "norm_type": float("inf"), "error_if_nonfinite": False}
    assert not fabric.clip_gradients(model, optimizer, **options).isfinite()
    optimizer.zero_grad()
    fabric.backward(model(torch.full((1, 2), 3.0)).sum())
    assert fabric.clip_gradients(model, optimizer, **options).item() == 3.0
    fabric.clip_gradients(model, optimizer, clip_val=0.5)
    assert net.weight.grad.abs().max() <= 0.5
    with pytest.raises(UsageError, match="found it inside"), fabric.no_backward_sync(model):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)  # an error has left the context, too
    nets = torch.nn.Linear(2, 1)
    both = (torch.optim.SGD([each], lr=0.1) for each in nets.parameters())
    model, optimizer, _ = fabric.setup(nets, *both)
    with pytest.raises(UsageError, match="one optimizer of the model .* found 2"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
