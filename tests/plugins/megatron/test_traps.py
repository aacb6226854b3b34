"""Mistakes that libraries of this kind have made, each with the tests that would see it here.

Where no file is named the test is in this one.

1. A row layer adds its bias on every rank:
   tensor/test_linear: test_column_then_row_equals_one_process; test_training:
   test_two_ranks (no bias there is zero)
2. Shards are drawn with one seed, and are alike:
   test_shards_are_parts_of_one_draw
3. A pipeline's gradient is too large by the number of micro-batches:
   test_gradients_do_not_depend_on_micro_batches
4. Label smoothing knows the local words only:
   test_losses_of_cut_logits; tensor/test_cross_entropy:
   test_smoothing_weights_and_ignored_targets
5. The loss changes the caller's logits in place:
   test_losses_of_cut_logits; tensor/test_cross_entropy: each test
6. Gathered logits go into the loss of cut ones, log(ranks) too much:
   test_losses_of_cut_logits
7. What is whole but sees a part of the heads or tokens keeps a part of its gradient:
   test_norms_of_heads_are_whole; test_norms: test_partial_gradients_count_whole
8. The norm counts copies several times, or misses parts:
   test_norm_of_cells; test_norms: test_norm_is_that_of_one_process
9. A tied weight counts twice in the norm:
   test_norm_of_cells
10. Norms of data-parallel shards are averaged, not summed:
   test_norm_of_cells; test_norms: test_over_data_parallel_ranks
11. Clipping knows one axis only:
   test_norm_of_cells
12. The loss is scaled by all ranks instead of by replicas:
   test_norm_of_cells
13. A mean of means stands for the mean over tokens:
   test_mean_over_tokens; pipeline/test_pipeline: test_ignored_labels
14. Buffers keep the first shape:
   test_every_step_has_another_shape
15. Ranks post messages in an order that deadlocks:
   pipeline/test_schedules; pipeline/test_pipeline: test_schedules
16. Evaluation before or between training steps breaks them:
   test_evaluation_first_and_in_between
17. Saving gathers on some ranks only:
   test_checkpoints, pipeline/test_pipeline_checkpoints: test_save (all ranks take part)
18. Ranks of a cell get different data:
   test_same_batch
19. A stage has buffers for all micro-batches:
   test_messages_under_way; pipeline/test_bubble: what is kept
20. ZeRO shards the copies of a tied weight in different ways:
   test_copies_of_a_tied_weight_stay_alike
21. A gradient that somebody else holds is reduced in place:
   tensor/test_operators: test_a_gradient_that_two_consumers_share_is_not_reduced_in_place;
   tensor/test_linear: test_a_group_leaves_a_gradient_that_somebody_else_holds_alone
22. The optimizer steps parameters that are no longer there:
   test_the_optimizer_has_the_parameters
23. An exception leaves the library changed:
   test_an_exception_leaves_no_trace; dropout/test_dropout:
   test_a_forward_that_fails_leaves_no_trace
24. Plans have the vocabulary of another release:
   plan/test_plans: test_plan_of_a_model_with_unknown_styles
25. An exception on one stage hangs the others:
   pipeline/test_failures: test_an_exception_on_one_stage
26. An overflow on one rank skips the step there alone:
   test_overflow_on_one_rank
27. Messages between stages have another dtype than their receiver thinks:
   test_messages_under_autocast
"""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.facade.options import GradScalerKwargs
from drivetrain.testing.conformance.twins import everyone
from drivetrain_megatron.pipeline.local import Interpreter
from drivetrain_megatron.tensor.logits import ShardedLogits
from huggingface_models import VOCABULARY, gpt2, llama, logits_of, token_batch

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def built(kind=gpt2, *args, **options):
    torch.manual_seed(0)
    return kind(*args, **options)


def loss_of(model, ids):
    return F.cross_entropy(logits_of(model(ids)).flatten(0, 1), ids.flatten())


class Twins:
    """A model under the strategy and the same in one process; ``token_batch(seed)`` for both."""

    def __init__(self, model, *, accumulation=1, optimizer=torch.optim.SGD, **options):
        self.twin = copy.deepcopy(model)
        self.accelerator = Accelerator(
            strategy={"name": "megatron", **options},
            gradient_accumulation_steps=accumulation,
            cpu=True,
        )
        self.other = optimizer(self.twin.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(
            model, optimizer(model.parameters(), lr=0.1)
        )

    def backward(self, *batches):
        """Run backward of one batch for each replica."""
        axis = self.accelerator.mesh["dp"]
        loss = loss_of(self.model, batches[axis.rank])
        self.accelerator.backward(loss)
        theirs = [loss_of(self.twin, ids) for ids in batches]
        torch.stack(theirs).mean().backward()
        assert loss.item() == pytest.approx(theirs[axis.rank].item(), rel=1e-6)

    def step(self):
        for optimizer in (self.optimizer, self.other):
            optimizer.step()
            optimizer.zero_grad()

    def check_gradients(self):
        whole, rank = dict(self.twin.named_parameters()), self.accelerator.mesh["tp"].rank
        facts = self.accelerator.strategy_of(self.model)._facts
        for name, parameter in self.model.named_parameters():
            expected, partition = whole[name].grad, facts[name].partition
            expected = expected if partition is None else partition.take(expected, rank)
            torch.testing.assert_close(
                parameter.grad, expected, **EXACT, msg=lambda m, name=name: f"{name} {m}"
            )

    def check_weights(self):
        whole = dict(self.twin.named_parameters())
        with self.accelerator.gathered(self.model):
            for name, mine in self.model.named_parameters():
                torch.testing.assert_close(
                    mine, whole[name], **EXACT, msg=lambda m, name=name: f"{name} {m}"
                )

    def close(self):
        self.accelerator.free_memory()


@pytest.mark.ranks(2)
def test_shards_are_parts_of_one_draw():
    both = Twins(built(llama), tp=2)
    facts = both.accelerator.strategy_of(both.model)._facts
    whole = dict(both.twin.named_parameters())
    parts = 0
    for name, parameter in both.model.named_parameters():
        partition = facts[name].partition
        mine, other = (
            whole[name] if partition is None else partition.take(whole[name], rank)
            for rank in (both.accelerator.process_index, 1 - both.accelerator.process_index)
        )
        assert torch.equal(parameter, mine), name
        if partition is not None:
            parts += 1
            smallest = [slice(min(sizes)) for sizes in zip(mine.shape, other.shape, strict=True)]
            assert not torch.equal(parameter[tuple(smallest)], other[tuple(smallest)]), name
    assert parts > 10
    both.close()


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 7])
@pytest.mark.ranks(2)
def test_gradients_do_not_depend_on_micro_batches(micro_batches):
    """Seven rows, so that most cuts are not even; gradients, since Adam would not see a factor."""
    both = Twins(built(gpt2, 3), pp=2, micro_batches=micro_batches)
    both.backward(token_batch(0, rows=7))
    both.check_gradients()
    both.close()


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.ranks(2)
def test_losses_of_cut_logits(smoothing, reduction):
    """Of cut logits, and of the same when they were gathered; the logits stay as they were."""
    both = Twins(built(llama), tp=2)
    ids = token_batch(0)
    options = {"label_smoothing": smoothing, "reduction": reduction}
    logits = logits_of(both.model(ids))
    expected = F.cross_entropy(logits_of(both.twin(ids)).flatten(0, 1), ids.flatten(), **options)
    assert isinstance(logits, ShardedLogits)
    before = logits.gathered().detach().clone()
    for given in (logits, logits.gathered(), logits + 0.0):
        loss = F.cross_entropy(given.flatten(0, 1), ids.flatten(), **options)
        torch.testing.assert_close(loss, expected, **EXACT)
        both.accelerator.backward(loss.sum(), retain_graph=True)
        assert torch.equal(logits.gathered(), before)
    expected.sum().mul(3).backward()
    both.check_gradients()
    assert math.log(2) > 0.1  # what it was once wrong by
    both.close()


def qwen():
    """A Qwen3 in fp64: its norms of queries and keys are whole, and see a part of the heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):  # the model's own computes in fp32
                setattr(module, name, nn.RMSNorm(child.weight.shape, dtype=torch.float64))
    return model


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.ranks(2)
def test_norms_of_heads_are_whole(sequence_parallel):
    both = Twins(built(qwen), tp=2, sequence_parallel=sequence_parallel)
    facts = both.accelerator.strategy_of(both.model)._facts
    assert facts["model.layers.0.self_attn.q_proj.weight"].partition is not None
    assert facts["model.layers.0.self_attn.q_norm.weight"].partition is None
    both.backward(token_batch(0))
    both.check_gradients()
    both.close()


CELLS = [
    {"tp": 2, "pp": 2},
    {"tp": 2, "data_parallel": {"name": "zero1"}},
    {"pp": 2, "data_parallel": {"name": "zero2"}},
    {"pp": 2, "order": "pp,dp,tp"},
]


@pytest.mark.parametrize("options", CELLS, ids=lambda o: "-".join(map(str, o)))
@pytest.mark.parametrize("p", [2.0, float("inf")])
@pytest.mark.ranks(4)
def test_norm_of_cells(options, p):
    """A tied weight, parts, copies and replicas: one norm, that of one process, on every rank."""
    both = Twins(built(gpt2, 2), **options)
    for step in range(2):
        both.backward(*(token_batch(2 * step + i) for i in range(both.accelerator.mesh["dp"].size)))
        norm = both.accelerator.clip_grad_norm_(both.model.parameters(), 0.05, p)
        expected = nn.utils.clip_grad_norm_(both.twin.parameters(), 0.05, p)
        torch.testing.assert_close(norm, expected, **EXACT)
        assert expected > 0.05
        assert len(set(everyone(norm.item()))) == 1
        both.step()
    both.check_weights()
    both.close()


@pytest.mark.parametrize("options", [{"pp": 2}, {"tp": 2}], ids=["pp", "tp"])
@pytest.mark.ranks(4)
def test_mean_over_tokens(options):
    """Windows of batches with 3 to 27 tokens, two replicas: every token counts the same."""
    both = Twins(built(gpt2, 2), accumulation=2, **options)
    replica = both.accelerator.mesh["dp"].rank
    sizes = [[(1, 3), (3, 9)], [(2, 7), (1, 4)]]
    batches = [
        [token_batch(10 * i + j, rows, length) for j, (rows, length) in enumerate(window)]
        for i, window in enumerate(sizes)
    ]
    for ids in batches[replica]:
        with both.accelerator.accumulate(both.model):
            loss = loss_of(both.model, ids)
            both.accelerator.backward(loss, weight=ids.numel())
    every = list(itertools.chain(*batches))
    total = sum(ids.numel() for ids in every)
    sum(loss_of(both.twin, ids) * ids.numel() for ids in every).div(total).backward()
    both.check_gradients()
    both.close()


@pytest.mark.parametrize(
    "options",
    [{"pp": 2, "micro_batches": 3}, {"tp": 2, "sequence_parallel": True}],
    ids=["pp", "tp"],
)
@pytest.mark.ranks(2)
def test_every_step_has_another_shape(options):
    both = Twins(built(gpt2, 3), **options)
    for seed, (rows, length) in enumerate([(5, 7), (1, 2), (4, 11), (2, 7), (5, 7)]):
        both.backward(token_batch(seed, rows, length))
        both.check_gradients()
        both.step()
    both.check_weights()
    both.close()


@pytest.mark.parametrize(
    "options",
    [{"pp": 2, "micro_batches": 2}, {"tp": 2}, {"pp": 2, "schedule": "zb-h1"}],
    ids=["pp", "tp", "zb-h1"],
)
@pytest.mark.ranks(2)
def test_evaluation_first_and_in_between(options):
    """With other rows; also between forward and backward, and between backward and step."""
    both = Twins(built(gpt2, 2), **options)

    def evaluate(rows):
        for model in (both.model, both.twin):
            model.eval()
        with torch.no_grad():
            ids = token_batch(99, rows=rows)
            losses = [loss_of(model, ids) for model in (both.model, both.twin)]
        for model in (both.model, both.twin):
            model.train()
        torch.testing.assert_close(*losses, **EXACT)

    evaluate(3)
    for step in range(2):
        ids = token_batch(step, rows=4)
        loss, expected = loss_of(both.model, ids), loss_of(both.twin, ids)
        evaluate(1)
        both.accelerator.backward(loss)
        expected.backward()
        evaluate(5)
        both.check_gradients()
        both.step()
        evaluate(2)
    both.close()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.ranks(2)
def test_messages_under_way(monkeypatch, schedule):
    """However many micro-batches there are, a rank waits for two messages at most."""
    posted = []
    expect = Interpreter._expect

    def counted(interpreter, action):
        expect(interpreter, action)
        posted.append(len(interpreter._arrivals))

    monkeypatch.setattr(Interpreter, "_expect", counted)
    both = Twins(built(gpt2, 2), pp=2, micro_batches=8, schedule=schedule)
    ids = token_batch(0, rows=8)
    both.accelerator.pipeline_step(
        both.model,
        ids,
        ids,
        loss_fn=lambda output, targets: F.cross_entropy(
            logits_of(output).flatten(0, 1), targets.flatten()
        ),
    )
    assert posted
    assert max(posted) <= 2
    loss_of(both.twin, ids).backward()
    both.check_gradients()
    both.close()


@pytest.mark.parametrize("inner", ["ddp", "zero1", "zero2"])
@pytest.mark.ranks(4)
def test_copies_of_a_tied_weight_stay_alike(inner):
    """Ten steps of AdamW; one copy is sharded by ZeRO and the other follows it, bit by bit."""
    both = Twins(built(gpt2, 2), optimizer=torch.optim.AdamW, pp=2, data_parallel={"name": inner})
    for step in range(10):
        both.backward(token_batch(2 * step), token_batch(2 * step + 1))
        both.step()
    with torch.no_grad():
        both.model(token_batch(0))  # copies follow before the next forward
    last = both.accelerator.mesh["pp"].rank == 1
    held = both.model.lm_head if last else both.model.transformer.wte
    bits = everyone(held.weight.detach().numpy().tobytes())
    assert len(bits) == 4
    assert len(set(bits)) == 1
    saved = both.accelerator.get_state_dict(both.model)
    torch.testing.assert_close(
        saved["transformer.wte.weight"], both.twin.transformer.wte.weight.data, rtol=1e-6, atol=1e-8
    )
    both.close()


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=["tp", "pp"])
@pytest.mark.ranks(2)
def test_the_optimizer_has_the_parameters(options):
    model = built(gpt2, 2)
    before = {id(parameter) for parameter in model.parameters()}
    both = Twins(model, **options)
    held = {id(p) for group in both.optimizer.param_groups for p in group["params"]}
    mine = {id(parameter) for parameter in both.model.parameters()}
    assert held == mine
    assert mine <= before  # objects that the script has hold of
    assert len(mine) < len(before) or options == {"tp": 2}
    both.close()


@pytest.mark.parametrize(
    "options", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}], ids=["whole", "shards"]
)
@pytest.mark.ranks(2)
def test_an_exception_leaves_no_trace(options):
    """Functions of torch are its own, and training goes on as if nothing had been."""
    functions = {name: getattr(F, name) for name in ("cross_entropy", "dropout", "linear")}
    plain = F.cross_entropy(torch.eye(3), torch.arange(3))
    both = Twins(built(llama), **options)
    ids = token_batch(0)

    def fail(*_):
        raise ArithmeticError("sprung")

    for place in (both.model.model.layers[1].mlp, both.model.lm_head):
        handle = place.register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            loss_of(both.model, ids)
        handle.remove()
    with pytest.raises(UsageError, match="targets from 0 to 96"):
        F.cross_entropy(logits_of(both.model(ids)).flatten(0, 1), ids.flatten() + VOCABULARY)
    assert all(getattr(F, name) is function for name, function in functions.items())
    torch.testing.assert_close(F.cross_entropy(torch.eye(3), torch.arange(3)), plain)
    for seed in range(2):
        both.backward(token_batch(seed))
        both.check_gradients()
        both.step()
    both.check_weights()
    both.close()


class Wide(nn.Module):
    """Blocks in fp32."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(4)
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    "options",
    [{"tp": 2, "pp": 2}, {"pp": 2, "data_parallel": {"name": "zero1"}}, {"tp": 4}],
    ids=["tp-pp", "pp-zero1", "tp"],
)
@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.ranks(4)
def test_overflow_on_one_rank(options, odd, value):
    """A gradient that is no number, on one rank: nobody steps, and all scales halve."""
    accelerator = Accelerator(
        strategy={"name": "megatron", **options},
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
        cpu=True,
    )
    model = built(Wide)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    ids = token_batch(0, rows=4)

    def train(broken=False):
        accelerator.backward(loss_of(model, ids))
        if broken and accelerator.process_index == odd:
            next(iter(accelerator.strategy_of(model).gradients())).view(-1)[:1] = value
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return everyone(accelerator.optimizer_step_was_skipped)

    assert set(train()) == {False}
    before = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    assert set(train(broken=True)) == {True}
    for name, tensor in accelerator.get_state_dict(model).items():
        assert torch.equal(tensor, before[name]), name
    assert set(everyone(accelerator.scaler.get_scale())) == {512.0}
    assert set(train()) == {False}
    moved = accelerator.get_state_dict(model)
    assert all(tensor.isfinite().all() for tensor in moved.values())
    assert any(not torch.equal(moved[name], before[name]) for name in before)
    accelerator.free_memory()


class Losing(Wide):
    """Makes its loss itself."""

    def forward(self, ids):
        return {"loss": F.cross_entropy(super().forward(ids).float().flatten(0, 1), ids.flatten())}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", [Wide, Losing])
@pytest.mark.ranks(2)
def test_messages_under_autocast(precision, schedule, accumulation, kind):
    """Gradients travel in the dtype of the outputs, though backward runs outside of autocast."""
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 2, "schedule": schedule},
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
        cpu=True,
    )
    model = built(kind)
    twin = copy.deepcopy(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def made(net, ids):
        return net(ids)["loss"] if kind is Losing else loss_of(net, ids)

    for step in range(2):
        for micro in range(accumulation):
            ids = token_batch(2 * step + micro, rows=4)
            with accelerator.accumulate(model):
                loss = made(model, ids)
                accelerator.backward(loss)
                expected = made(twin, ids)
                (expected / accumulation).backward()
        assert loss.item() == pytest.approx(expected.item(), rel=0.02)
        accelerator.unscale_gradients()
        whole = dict(twin.named_parameters())
        for name, parameter in model.named_parameters():
            gradient = whole[name].grad
            distance = (parameter.grad - gradient).norm() / gradient.norm()
            assert distance < 0.05, (name, distance)
        optimizer.zero_grad()
        twin.zero_grad()
    accelerator.free_memory()
