"""The loss in pieces equals torch's, alone and in language models under strategies."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.losses import compute_in_pieces, linear_cross_entropy, restore_loss
from drivetrain.testing.conformance.suite import everyone
from huggingface_models import VOCABULARY, bert, gpt2, llama, token_batch

TENTHS = (torch.float64, 1e-12), (torch.float32, 1e-6)


@pytest.mark.parametrize(("dtype", "close"), TENTHS)
def test_loss_and_gradients_of_each_option(dtype, close):
    torch.manual_seed(0)
    for has_bias, has_weight, smoothing, reduction, ignored in itertools.product(
        (False, True), (False, True), (0.0, 0.1), ("mean", "sum"), (-100, 3)
    ):
        hidden = torch.randn(3, 50, 16, dtype=dtype, requires_grad=True)
        matrix = (torch.randn(40, 16, dtype=dtype) / 4).requires_grad_()
        bias = torch.randn(40, dtype=dtype, requires_grad=True) if has_bias else None
        target = torch.randint(40, (3, 50))
        target[0, :9] = ignored
        options = {
            "weight": torch.rand(40, dtype=dtype) if has_weight else None,
            "ignore_index": ignored,
            "label_smoothing": smoothing,
            "reduction": reduction,
        }
        ours = linear_cross_entropy(hidden, matrix, target, linear_bias=bias, rows=7, **options)
        logits = F.linear(hidden, matrix, bias).flatten(0, 1)
        theirs = F.cross_entropy(logits, target.flatten(), **options)
        sides = [each for each in (hidden, matrix, bias) if each is not None]
        found = [[each, *torch.autograd.grad(each * 3, sides)] for each in (ours, theirs)]
        for mine, its in zip(*found, strict=True):
            assert (mine - its).abs().max() <= close * max(1, its.abs().max())


def test_z_loss_and_rows_that_do_not_count():
    hidden = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, 2, -100, 8, -100, 0])
    with torch.autocast("cpu", torch.bfloat16):  # which leaves fp64 as it is
        ours = linear_cross_entropy(hidden, matrix, target, z_loss=0.3, rows=4)
    logits = F.linear(hidden, matrix)
    z = logits.logsumexp(1).square()[target >= 0].mean()
    theirs = F.cross_entropy(logits, target) + 0.3 * z
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    grads = [torch.autograd.grad(each, [hidden, matrix]) for each in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)
    hidden.data[2] = float("nan")
    assert linear_cross_entropy(hidden, matrix, target).isfinite()
    for reduction, none in (("sum", 0.0), ("mean", float("nan"))):
        ignored = torch.tensor([-100, -100])
        nothing = linear_cross_entropy(hidden[:2], matrix, ignored, reduction=reduction)
        torch.testing.assert_close(nothing.item(), none, equal_nan=True)
        assert torch.autograd.grad(nothing, matrix)[0].count_nonzero() == 0


class Rows(TorchDispatchMode):
    """Notes the rows of each product that has a bias."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if func is torch.ops.aten.addmm.default:
            self.found.append((len(result), result.dtype))
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_eighth_of_the_logits_at_most_and_the_dtype_of_autocast(dtype):
    """Gradients of rare words in a mean of many are far below the smallest number of fp16."""
    torch.manual_seed(0)
    hidden, matrix = torch.randn(2000, 4, requires_grad=True), torch.randn(400, 4)
    target, matrix = torch.randint(200, (2000,)), matrix.div_(4).requires_grad_()
    bias = torch.where(torch.arange(400) < 200, 0.0, -4.0)
    with Rows() as rows, torch.autocast("cpu", dtype):
        loss = linear_cross_entropy(hidden, matrix, target, linear_bias=bias)
    assert rows.found == [(250, dtype)] * 8
    whole = F.cross_entropy(F.linear(hidden, matrix, bias), target)
    torch.testing.assert_close(loss, whole, rtol=2e-2, atol=0)
    ours = torch.autograd.grad(2.0**16 * loss, [hidden, matrix])
    theirs = torch.autograd.grad(2.0**16 * whole, [hidden, matrix])
    for mine, its in zip((*ours, ours[1][200:]), (*theirs, theirs[1][200:]), strict=True):
        assert mine.dtype == torch.float32
        assert (mine - its).norm() < 3e-2 * its.norm()


def test_wrong_inputs():
    hidden, matrix = torch.randn(2, 4), torch.randn(3, 4)
    with pytest.raises(UsageError, match=r"found \(2, 4\), \(3, 4\) and \(3,\)"):
        linear_cross_entropy(hidden, matrix, torch.zeros(3, dtype=torch.long))
    with pytest.raises(UsageError, match="1 row or more, found rows=-1"):
        linear_cross_entropy(hidden, matrix, torch.zeros(2, dtype=torch.long), rows=-1)
    with pytest.raises(UsageError, match="reduction mean or sum, found 'none'"):
        linear_cross_entropy(hidden, matrix, torch.zeros(2, dtype=torch.long), reduction="none")


def losses(strategy, loss, model, *, steps=3, items=None):
    """Return the losses of some steps, and the weights after them."""
    accelerator = Accelerator(strategy=strategy, config={"loss": loss}, cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = []
    for step in range(steps):
        ids = token_batch(10 * step + accelerator.process_index)
        labels = ids.where(ids % 5 > 0, -100)
        output = model(input_ids=ids, labels=labels, num_items_in_batch=items)
        assert ("logits" in output) == (loss == "whole")
        accelerator.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(output.loss.detach().float())  # theirs is fp32 in a model of fp64, too
    state = accelerator.get_state_dict(model)
    with torch.no_grad():
        assert model(input_ids=ids, labels=labels).logits.shape[-1] == VOCABULARY
    accelerator.free_memory()
    return [everyone(each) for each in found], state


@pytest.mark.parametrize("strategy", ["zero3", "fsdp", "ddp", "offload"])
@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.ranks(2)
def test_language_models_train_alike(strategy, build):
    """The head's matrix is tied to the embedding's in one of them; the other has a head alone."""
    found = {}
    for loss in ("whole", "chunked"):
        torch.manual_seed(0)
        found[loss] = losses(strategy, loss, build(), items=torch.tensor(31))
    torch.testing.assert_close(found["chunked"], found["whole"], rtol=1e-6, atol=1e-7)


def test_models_whose_loss_is_another_are_refused_and_others_compute_the_same():
    with pytest.raises(UsageError, match="causal language model of transformers, found Linear"):
        compute_in_pieces(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="to compute ForCausalLMLoss, found ForMaskedLMLoss"):
        compute_in_pieces(bert())
    capped = llama()
    capped.lm_head.register_forward_hook(lambda _, __, logits: torch.tanh(logits))
    compute_in_pieces(capped)
    ids = token_batch(0)
    with pytest.raises(UsageError, match="found a loss of other values"):
        capped(input_ids=ids, labels=ids)
    with pytest.raises(UsageError, match="a head that is called with"):
        capped(input_ids=ids, labels=ids, logits_to_keep=2)
    restore_loss(capped)
    shape = (*ids.shape, VOCABULARY)
    assert capped(input_ids=ids, labels=ids).logits.shape == shape

    class Forgets(type(capped)):
        def forward(self, ids, labels, num_items_in_batch):
            return super().forward(ids, labels=labels)

    model = llama()
    model.__class__ = Forgets
    compute_in_pieces(model)
    with pytest.raises(UsageError, match="found a loss of other values"):
        model(ids, ids, torch.tensor(31))

    # Options of a call reach its loss, and calls that do not train have logits.
    ignored = {"ignore_index": int(ids[0, 3])}
    for options in (ignored, {"shift_labels": ids}, {"return_dict": False}):
        model = llama()
        whole = model(ids, labels=ids, **options)[0]
        compute_in_pieces(model)
        found = model(ids, labels=ids, **options)
        torch.testing.assert_close(found[0].float(), whole)
        assert found[1] is None or "return_dict" not in options
        assert model.eval()(ids, labels=ids).logits.shape == (*ids.shape, VOCABULARY)
