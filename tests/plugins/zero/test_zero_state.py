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
from torch import nn
from torch.optim import AdamW

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.testing.conformance.twins import Twins, adamw, everyone, momentum, weights
from drivetrain.testing.models import CASES

SMALL = {"bucket_mib": 0.001}
SHARDED = {"name": "zero3", "keep_below": 0}
STAGES = {
    "zero1": {"name": "zero1", **SMALL},
    "zero2": {"name": "zero2", **SMALL},
    "zero3": {"name": "zero3", **SMALL},
    "sharded": SHARDED,
}


def each(strategies):
    return pytest.mark.parametrize("strategy", list(strategies.values()), ids=list(strategies))


def start(strategy, **options):
    return Accelerator(strategy=strategy, cpu=True, **options)


def train(twins, steps):
    for step in steps:
        twins.backward(step)
        twins.step()
    twins.check()


@each(STAGES)
@pytest.mark.ranks(2)
def test_state_dict_by_the_user(strategy):
    """Keys and shapes are the user's, on rank 0 alone too; values are right or refused at once."""
    for name in ("tied", "batchnorm", "transposed"):
        accelerator = start(strategy)
        twins = Twins(accelerator, CASES[name], adamw)
        twins.backward(0)
        twins.step()
        expected = twins.twin.state_dict()
        if accelerator.is_main_process:  # while updated parameters are on their way
            shown = twins.model.state_dict()
            facts = {key: (t.shape, t.dtype, t.device) for key, t in shown.items()}
            assert facts == {key: (t.shape, t.dtype, t.device) for key, t in expected.items()}
            for key, tensor in shown.items():
                sharded = strategy == SHARDED
                if sharded and key in dict(twins.twin.named_parameters(remove_duplicate=False)):
                    for use in (torch.Tensor.sum, torch.Tensor.clone, torch.Tensor.tolist):
                        with pytest.raises(UsageError, match="get_state_dict"):
                            use(tensor)
                    with pytest.raises(UsageError, match="get_state_dict"):
                        pickle.dumps(tensor)
                elif key not in dict(twins.twin.named_buffers()):
                    torch.testing.assert_close(tensor, expected[key], rtol=1e-10, atol=1e-10)
        whole = accelerator.get_state_dict(twins.model)
        assert list(whole) == list(expected)
        for key, _ in twins.twin.named_parameters(remove_duplicate=False):
            torch.testing.assert_close(whole[key], expected[key], rtol=1e-10, atol=1e-10)
        names = [key for key, _ in twins.model.named_parameters()]
        assert names == [key for key, _ in twins.twin.named_parameters()]
        train(twins, range(1, 3))
        accelerator.free_memory()


@each(STAGES)
@pytest.mark.ranks(2)
def test_load_state_dict_by_the_user(strategy):
    """Into whole parameters it works on every rank; into sharded ones inside gathered() only."""
    accelerator = start(strategy)
    case = CASES["tied"]
    twins = Twins(accelerator, case, momentum)
    train(twins, range(1))
    other = case.build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    given = other.state_dict()
    if strategy == SHARDED:
        if accelerator.is_main_process:  # at once, and without the other rank
            with pytest.raises(RuntimeError, match=r"accelerator\.gathered"):
                twins.model.load_state_dict(given)
            with pytest.raises(UsageError, match=r"accelerator\.gathered"):
                twins.model.body.weight.data = given["body.weight"]
            with pytest.raises(UsageError, match=r"accelerator\.gathered"):
                nn.init.normal_(twins.model.body.weight)
            with torch.no_grad(), pytest.raises(UsageError, match=r"accelerator\.gathered"):
                twins.model.body.weight += 1.0
            with torch.no_grad(), pytest.raises(UsageError, match=r"accelerator\.gathered"):
                twins.model.body.weight[0] = 1.0
            with torch.no_grad(), pytest.raises(UsageError, match=r"accelerator\.gathered"):
                torch._foreach_mul_(list(twins.model.parameters()), 0.5)
        twins.check()
        for everywhere in (False, True):
            with accelerator.gathered(twins.model):
                if everywhere or accelerator.is_main_process:
                    twins.model.load_state_dict(given)
            twins.twin.load_state_dict(given)
            train(twins, range(1, 3))
    else:
        with accelerator.gathered(twins.model):
            if accelerator.is_main_process:
                twins.model.load_state_dict(given)
        twins.twin.load_state_dict(given)
        train(twins, range(1, 3))
    accelerator.free_memory()


@each(STAGES)
@pytest.mark.ranks(2)
def test_surgery_on_whole_parameters(strategy):
    """Changes of rank 0 or of all ranks last, by any means; reading alone sends no values back."""
    accelerator = start(strategy, mixed_precision="no")
    twins = Twins(accelerator, CASES["transposed"], adamw)
    train(twins, range(1))
    for everywhere in (False, True):
        with accelerator.gathered(twins.model):
            if everywhere or accelerator.is_main_process:
                operate(twins.model)
        operate(twins.twin)
        train(twins, range(1, 3))
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
    accelerator.free_memory()


def operate(model):
    """Change values in four ways that scripts do."""
    with torch.no_grad():
        model.weight.mul_(0.5)
        model.weight[1] = 0.25
        model.kernel.data.copy_(model.kernel.data.flip(0))
        model.kernel.data[0, 0].fill_(0.125)


def calls(accelerator, operation):
    entry = accelerator.traffic.entries().get(("dp", operation))
    return entry.calls if entry else 0


@each(STAGES)
@pytest.mark.ranks(2)
def test_inference_gathers_once(strategy):
    """Ranks generate texts of different length without a word to each other, then train on."""
    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["tied"], adamw)
    train(twins, range(1))
    units = accelerator.strategy_of(twins.model).placement.units
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
    assert all(unit.resident or unit.live_bytes == 0 for unit in units), (
        "sharded units stay whole after inference"
    )
    copied(text)  # an ordinary model
    train(twins, range(1, 3))
    accelerator.free_memory()


@each(STAGES)
@pytest.mark.ranks(2)
def test_buffers(strategy):
    """Statistics are rank 0's, or each rank's own; integers and what is not saved stay so."""
    for policy in ("broadcast", "none"):
        accelerator = start({**strategy, "buffers": policy})
        case = CASES["batchnorm"]
        twins = Twins(accelerator, case, momentum)
        own = case.build()
        for step in range(3):
            batch = case.batch(step, accelerator.process_index)
            accelerator.backward(case.loss(twins.model, batch))
            # What the statistics should be: a model with these weights on the batches of one rank.
            source = 0 if policy == "broadcast" else accelerator.process_index
            own.load_state_dict({**weights(accelerator, twins.model), **buffers_of(own)})
            case.loss(own, case.batch(step, source))
            twins.optimizer.step()
            twins.optimizer.zero_grad()
        found, expected = buffers_of(twins.model), buffers_of(own)
        assert (
            found.keys()
            == expected.keys()
            == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
        )
        for name, tensor in found.items():
            assert tensor.dtype is expected[name].dtype
            torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12)
        assert "factor" not in twins.model.state_dict()
        assert twins.model.factor.item() == 0.5
        accelerator.free_memory()


def buffers_of(model):
    names = dict(model.named_parameters())
    return {key: tensor for key, tensor in model.state_dict().items() if key not in names}


def stack():
    torch.manual_seed(2)
    blocks = [nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24)) for _ in range(4)]
    return nn.Sequential(nn.Linear(9, 24), *blocks, nn.Linear(24, 3))


def trained_bits(strategy):
    """Return the fp32 weights after four steps of windows of two micro-batches, clipped."""
    accelerator = start(strategy, gradient_accumulation_steps=2)
    built = stack()
    model, optimizer = accelerator.prepare(built, AdamW(built.parameters(), lr=0.01, fused=False))
    generator = torch.Generator().manual_seed(7 + accelerator.process_index)
    for _ in range(8):
        with accelerator.accumulate(model):
            inputs = torch.randn(5, 9, generator=generator)
            accelerator.backward(F.mse_loss(model(inputs), torch.ones(5, 3)))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    result = weights(accelerator, model)
    accelerator.free_memory()
    return result


def same(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def close(one, other):
    return all(torch.allclose(t, other[name], rtol=1e-4, atol=1e-6) for name, t in one.items())


@each(STAGES)
@pytest.mark.ranks(3)
def test_same_bits_every_time(strategy):
    """Runs are bitwise alike, whatever is gathered ahead; buckets change the order of sums only."""
    first = trained_bits(strategy)
    assert same(first, trained_bits(strategy))
    for options in ({"prefetch": 0}, {"prefetch": 3}, {"reshard_after_forward": False}):
        if strategy["name"] == "zero3":
            assert same(first, trained_bits({**strategy, **options})), options
    if strategy["name"] != "zero1":
        assert same(first, trained_bits({**strategy, "buffers_in_flight": 2}))
    assert close(first, trained_bits({**strategy, "bucket_mib": 1.0}))


@pytest.mark.ranks(2)
def test_two_ranks_have_one_order_of_sums():
    """With two ranks there is nothing to reorder: all stages and buckets give the same bits."""
    results = []
    for strategy in (*STAGES.values(), {"name": "zero1"}, {**SHARDED, "partition": "parameter"}):
        accelerator = start(strategy)
        built = stack()
        model, optimizer = accelerator.prepare(
            built, torch.optim.SGD(built.parameters(), lr=0.1, momentum=0.9, foreach=True)
        )
        generator = torch.Generator().manual_seed(7 + accelerator.process_index)
        for _ in range(4):
            inputs = torch.randn(5, 9, generator=generator)
            accelerator.backward(F.mse_loss(model(inputs), torch.ones(5, 3)))
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(accelerator, model))
        accelerator.free_memory()
    for result in results[1:]:
        assert same(results[0], result)
