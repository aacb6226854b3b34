"""What users see of a model under ZeRO: state dicts, buffers, whole parameters, the same bits.

The conformance suite covers shards that hold everything once, resume bit by bit, buffers' values in
training, dtypes of buffers under a precision; tests/integration covers saving and loading across
strategies. Here is what a sharded model shows between steps, and what may be done to it.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from drivetrain.errors import UsageError
from drivetrain.testing.conformance.suite import Twins, adamw, everyone, momentum, weights
from drivetrain.testing.models import CASES
from stacks import Residual, Stack
from zero_stages import MASTERS, SHARDED, assert_freed, calls, each, start, train, units_of

pytestmark = pytest.mark.ranks(2)


@each("sharded", "zero1")
def test_state_dict_by_the_user(strategy):
    """Keys and shapes are the user's, on rank 0 alone too; values are right or refused at once."""
    for name in ("tied", "batchnorm", "transposed"):
        accelerator = start(strategy)
        twins = Twins(accelerator, CASES[name], adamw)
        twins.backward(0)
        twins.step()
        expected = twins.twin.state_dict()
        trained = dict(twins.twin.named_parameters(remove_duplicate=False))
        if accelerator.is_main_process:  # while updated parameters are on their way
            shown = twins.model.state_dict()
            facts = {key: (t.shape, t.dtype, t.device) for key, t in shown.items()}
            assert facts == {key: (t.shape, t.dtype, t.device) for key, t in expected.items()}
            for key in trained:
                if strategy == SHARDED:
                    assert "values elsewhere" in repr(shown[key])
                    for use in (Tensor.sum, Tensor.clone, Tensor.tolist, pickle.dumps):
                        with pytest.raises(UsageError, match="get_state_dict") as caught:
                            use(shown[key])
                        # An embedding and its head are tied.
                        names = (f"'{key}'", f"'{key.replace('head', 'embedding')}'")
                        assert any(each in str(caught.value) for each in names)
                else:
                    torch.testing.assert_close(shown[key], expected[key], rtol=1e-10, atol=1e-10)
        whole = accelerator.get_state_dict(twins.model)
        assert list(whole) == list(expected)
        for key in trained:
            torch.testing.assert_close(whole[key], expected[key], rtol=1e-10, atol=1e-10)
        train(twins, range(1, 3))


@each("sharded", "zero1")
def test_load_state_dict_by_the_user(strategy):
    """Into whole parameters it works on every rank; into sharded ones inside gathered() only.

    There changes of rank 0 or of all ranks last, by any means; reading alone sends nothing back.
    """
    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["tied"], momentum)
    train(twins, range(1))
    weight = twins.model.body.weight
    given = {key: 0.9 * value for key, value in twins.case.build().state_dict().items()}
    if strategy == SHARDED:
        if accelerator.is_main_process:  # at once, and without the other rank
            with pytest.raises(UsageError, match=r"accelerator\.gathered"):
                twins.model.load_state_dict(given)
            for write in (
                lambda: setattr(weight, "data", given["body.weight"]),
                lambda: nn.init.normal_(weight),
                lambda: weight.__iadd__(1.0),
                lambda: weight.__setitem__(0, 1.0),
                lambda: torch._foreach_mul_(list(twins.model.parameters()), 0.5),
            ):
                with torch.no_grad(), pytest.raises(UsageError, match=r"accelerator\.gathered"):
                    write()
        twins.check()
    for everywhere in (False, True):
        with accelerator.gathered(twins.model):
            if everywhere or accelerator.is_main_process:
                twins.model.load_state_dict(given)
        twins.twin.load_state_dict(given)
        train(twins, range(1, 3))
    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["transposed"], adamw)
    train(twins, range(1))
    for everywhere in (False, True):
        with accelerator.gathered(twins.model):
            if everywhere or accelerator.is_main_process:
                operate(twins.model)
        operate(twins.twin)
        train(twins, range(1, 2))
    with accelerator.gathered([twins.model.kernel]):
        if accelerator.is_main_process:
            twins.model.kernel.data.view(torch.int64).bitwise_xor_(1)  # the last bit of each
    twins.twin.kernel.data.view(torch.int64).bitwise_xor_(1)
    train(twins, range(3, 4))
    before = accelerator.traffic.sent()
    with accelerator.gathered(twins.model):
        norm = twins.model.weight.norm().item()
    after = accelerator.traffic.sent()
    assert norm == pytest.approx(twins.twin.weight.norm().item(), rel=1e-10)
    assert before.get(("dp", "broadcast"), 0) == after.get(("dp", "broadcast"), 0)


def operate(model):
    """Change values in four ways that scripts do."""
    with torch.no_grad():
        model.weight.mul_(0.5)
        model.weight[1] = 0.25
        model.kernel.data.copy_(model.kernel.data.flip(0))
        model.kernel.data[0, 0].fill_(0.125)


@each("sharded", "zero1")
def test_inference_gathers_once(strategy):
    """Ranks generate texts of different length without a word to each other, then train on."""
    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["tied"], adamw)
    train(twins, range(1))
    units = units_of(twins)
    before = calls(accelerator, "all_gather")
    with accelerator.inference(twins.model) as model:
        inside = calls(accelerator, "all_gather")
        assert inside - before == sum(not unit.resident for unit in units)
        text = torch.zeros(1, 4, dtype=torch.int64)
        wanted = text.clone()
        for _ in range(3 + 4 * accelerator.process_index):
            assert not model.training
            text = torch.cat([text, model(text).argmax(-1, keepdim=True)], dim=1)
            with torch.no_grad():
                wanted = torch.cat([wanted, twins.twin(wanted).argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(text, wanted)
        copied = copy.deepcopy(model)
    everyone(None)
    assert calls(accelerator, "all_gather") == inside, "leaving inference gathered again"
    assert model.training
    assert_freed(twins)
    copied(text)  # an ordinary model
    train(twins, range(1, 3))


@each("sharded", "zero1")
def test_statistics_of_each_rank(strategy):
    """With ``buffers: none`` they are the rank's own; integers and what is not saved stay so."""
    accelerator = start({**strategy, "buffers": "none"})
    case = CASES["batchnorm"]
    twins = Twins(accelerator, case, momentum)
    twins.train_alone(0, 2)
    means = everyone(twins.model.norm.running_mean)
    assert not torch.equal(means[0], means[1])
    assert everyone(int(twins.model.norm.num_batches_tracked)) == [2, 2]
    assert "factor" not in twins.model.state_dict()


def trained_bits(strategy):
    """Return the fp32 weights after two steps of windows of two micro-batches, clipped."""
    accelerator = start(strategy, gradient_accumulation_steps=2)
    torch.manual_seed(2)
    blocks = [Residual(24, 40) for _ in range(4)]
    built = Stack(blocks, first=nn.Linear(9, 24), last=nn.Linear(24, 3))
    model, optimizer = accelerator.prepare(built, AdamW(built.parameters(), lr=0.01, fused=False))
    generator = torch.Generator().manual_seed(7 + accelerator.process_index)
    for _ in range(4):
        with accelerator.accumulate(model):
            inputs = torch.randn(5, 9, generator=generator)
            accelerator.backward(F.mse_loss(model(inputs), torch.ones(5, 3)))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return weights(accelerator, model)


@each("sharded", "zero2")
@pytest.mark.ranks(3)
def test_same_bits_every_time(strategy):
    """Runs are bitwise alike, whatever is gathered ahead; buckets change the order of sums only."""
    first = trained_bits(strategy)
    ways = [{}]
    if strategy == SHARDED:
        ways += [{"prefetch": 3, "buffers_in_flight": 2}, {"reshard_after_forward": False}]
    for options in ways:
        again = trained_bits({**strategy, **options})
        assert all(torch.equal(tensor, again[name]) for name, tensor in first.items()), options
    torch.testing.assert_close(
        trained_bits({**strategy, "bucket_mib": 1.0}), first, rtol=1e-4, atol=1e-6
    )


@each("sharded", "zero1")
def test_surgery_changes_what_was_changed_alone(strategy):
    """Masters of other parameters keep their digits; twice an fp64 value is a change."""
    accelerator = start(strategy, **MASTERS)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, _ = accelerator.prepare(model, adamw(model))
    shards = accelerator.strategy_of(model).state.shards
    before = {s.name: s.tensor.clone() for s in shards() if not s.state}
    with accelerator.gathered(model), torch.no_grad():
        model[0].bias.fill_(3.0)
    for shard in shards():
        if not shard.state:
            expected = 3.0 * torch.ones(1) if shard.name == "0.bias" else before[shard.name]
            assert shard.tensor.equal(expected.expand_as(shard.tensor)), shard.name
    accelerator = start(strategy)
    model = nn.Linear(64, 64, bias=False, dtype=torch.float64)
    model, _ = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    with accelerator.gathered(model):
        kept = model.weight.detach().clone()
        if accelerator.is_main_process:
            with torch.no_grad():
                model.weight.mul_(2)
    with accelerator.gathered(model):
        assert torch.equal(model.weight, 2 * kept)
