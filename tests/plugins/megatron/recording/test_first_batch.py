"""Example inputs from a loader of the script: how a batch becomes the arguments of a forward."""

import functools
import itertools
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import huggingface_models
from cases import case
from drivetrain import Accelerator
from drivetrain.data.examples import LENGTH, ExampleBatch
from drivetrain.errors import RankMismatchError, UsageError
from drivetrain.testing.conformance.suite import everyone
from drivetrain_megatron.recording.calls import example_inputs
from huggingface_models import llama
from stacks import Residual, Stack

WIDTH = 8
X, Y, SCALE = torch.zeros(2, WIDTH), torch.ones(2, dtype=torch.long), torch.tensor(2.0)


class Takes(nn.Module):
    """A layer behind a forward of choice."""

    def __init__(self, forward):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.inner = forward

    def forward(self, *args, **kwargs):
        return self.layer(self.inner(*args, **kwargs))


def only(x):
    return x


class Named(Takes):
    def forward(self, x, scale, labels=None):
        found = self.layer(x) * scale
        return found if labels is None else nn.functional.cross_entropy(found, labels)


class Plain(Takes):
    def forward(self, features):
        return self.layer(features)


def found(model, batch):
    inputs = example_inputs(model, [ExampleBatch("rows", batch)])
    return inputs.args, inputs.kwargs


def same(inputs, args, **kwargs):
    assert len(inputs[0]) == len(args)
    assert set(inputs[1]) == set(kwargs)
    pairs = [*zip(inputs[0], args, strict=True), *((inputs[1][k], kwargs[k]) for k in kwargs)]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)


def test_a_dict_is_given_by_name_or_by_position():
    batch = {"id": 7, "x": X, "scale": SCALE, "labels": Y}
    same(found(Named(only), batch), (), x=X, scale=SCALE, labels=Y)
    wrong = {**batch, "labels": Y[:, None, None]}  # of another task
    same(found(Named(only), wrong), (), x=X, scale=SCALE)
    same(found(Plain(only), {"image": X, "target": Y}), (X,))
    same(found(Plain(only), {"id": Y, "image": X}), (X,))


def test_a_tuple_is_given_as_far_as_the_forward_takes_it():
    same(found(Takes(lambda x, y: x + y[:, None]), [X, Y]), (X, Y))
    same(found(Plain(only), (X, Y)), (X,))
    same(found(Plain(only), X), (X,))
    same(found(Named(only), ({"x": X, "scale": SCALE}, Y)), (), x=X, scale=SCALE)
    same(found(Takes(lambda x, z: x + z), ((X, X), Y)), (X, X))
    # It takes the dtype of the model, and a misfit is dropped.
    same(found(Plain(only).bfloat16(), (X, Y)), (X.bfloat16(),))
    (guess,) = example_inputs(Plain(only), [ExampleBatch("rows", {"text": "abc"})]).args
    assert guess.shape == (2, WIDTH)


def test_long_sequences_are_cut_where_they_have_content():
    tokens, mask = torch.arange(200).view(2, 100) % 97, torch.zeros(2, 100, dtype=torch.long)
    mask[:, 60:] = 1  # padded on the left
    tokens = tokens * mask
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    _, kwargs = found(llama(), batch)
    assert {tuple(value.shape) for value in kwargs.values()} == {(2, LENGTH)}
    assert kwargs["attention_mask"].all()
    assert torch.equal(kwargs["input_ids"], tokens[:, 60 : 60 + LENGTH])


def test_sequences_stay_whole_where_the_model_needs_their_length():
    class Fixed(Plain):
        def __init__(self):
            super().__init__(only)
            self.words, self.positions = nn.Embedding(50, WIDTH), nn.Parameter(torch.zeros(40, 8))

        def forward(self, ids):
            return self.layer(self.words(ids) + self.positions)

    ids = torch.zeros(2, 40, dtype=torch.long)
    same(found(Fixed(), [ids]), (ids,))


def test_the_error_is_short_and_has_a_line_for_each_reason():
    def never(*args, **kwargs):
        raise KeyError("no " + "way " * 100)

    examples = [ExampleBatch("rows of A", X), ExampleBatch("rows of B", problem="OSError: gone")]
    with pytest.raises(UsageError) as raised:
        example_inputs(Takes(never), examples)
    head, *tried, way_out = str(raised.value).split("\n")
    assert head.startswith("expected inputs with which Takes can be called once, found none")
    assert tried[0].startswith("  rows of A and 2 more: KeyError: 'no way")
    assert tried[1] == "  rows of B: OSError: gone"
    assert way_out.startswith("set model.example_inputs")
    assert max(map(len, tried)) < 200
    with pytest.raises(UsageError, match="\nprepare the model together with its loader, or set"):
        example_inputs(Takes(never))

    counted = itertools.count(1)

    def numbered(*args):
        raise KeyError(next(counted))

    batch = tuple(X for _ in range(20))
    with pytest.raises(UsageError, match="and 18 other errors") as raised:
        example_inputs(Takes(numbered), [ExampleBatch("rows", batch)])
    assert len(str(raised.value).split("\n")) == 7


class Two(Stack):
    """Blocks that need two inputs, which nobody would guess."""

    def __init__(self):
        super().__init__([Residual(WIDTH), Residual(WIDTH)])

    def forward(self, left, right):
        return super().forward(left + right)


class OneBroken(Dataset):
    """Cannot be read on rank 0."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if torch.distributed.get_rank() == 0:
            raise OSError("no such file")
        return torch.zeros(WIDTH), torch.zeros(WIDTH)


@pytest.mark.ranks(2)
def test_inputs_that_one_rank_lacks_are_an_error_on_every_rank():
    accelerator = Accelerator(strategy={"name": "megatron", "pp": 2}, cpu=True)
    with pytest.raises(UsageError, match="rows 0 and 1 of OneBroken: OSError: no such") as raised:
        accelerator.prepare(Two(), DataLoader(OneBroken(), 2))
    assert len(set(everyone(str(raised.value)))) == 1
    accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
    model = Two()
    if accelerator.is_main_process:
        model.example_inputs = (X, X)
    pairs = TensorDataset(torch.ones(8, WIDTH), torch.ones(8, WIDTH))
    with pytest.raises(RankMismatchError, match=r"example_inputs alike.*\(2, 8\).*NoneType"):
        accelerator.prepare(model, DataLoader(pairs, 2))


# --- prepare() runs the user's forward once, whatever it plans; for layers, in evaluation, too ---


PP = {"pp": 2, "micro_batches": 2}


gpt2 = functools.partial(huggingface_models.gpt2, 4, dropout=0.1)


class Guessed(nn.Module):
    """Has no inputs of its own; the first guess is right."""

    def __init__(self):
        super().__init__()
        self.model = gpt2()

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids).loss


def forwards(build, **options):
    """Return how often prepare() runs a model's forward."""
    model, count = build(), []
    own = type(model).forward

    @functools.wraps(own)
    def forward(module, *args, **kwargs):
        if module is model:
            count.append(module.training)
        return own(module, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", forward)  # a prepared model has another class
        accelerator = Accelerator(strategy={"name": "megatron", **options}, cpu=True)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return count


def once_for_reference(build):
    """Values and gradients that trials must reproduce come from the same run of a block.

    The trial of the whole model runs every block once more.
    """
    model, runs, thread = build(), [], threading.get_ident()
    blocks = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    own = type(blocks[0]).forward

    @functools.wraps(own)
    def forward(module, x, *args, **kwargs):
        if type(x) is torch.Tensor and threading.get_ident() == thread:  # trials have threads
            runs.append(torch.is_grad_enabled())
        return own(module, x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(blocks[0]), "forward", forward)
        accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert runs == [True] * (1 + len(blocks))


@pytest.mark.ranks(2)
def test_one_forward_in_each_mode_and_one_of_a_block_for_reference():
    for build, options in ((gpt2, {"tp": 2}), (llama, PP), (Guessed, {**PP, "cut": "profile"})):
        expected = [True, False] if "tp" in options else [True]
        assert forwards(build, **options) == expected, (build, options)
    for build in (gpt2, llama):
        with case(build):
            once_for_reference(build)


@pytest.mark.ranks(4)
def test_one_forward_for_both():
    assert forwards(Guessed, tp=2, **PP, cut="profile") == [True, False]
