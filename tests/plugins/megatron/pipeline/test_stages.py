"""Stages of unmodified models, run one after another: outputs and gradients of the whole model."""

import copy
import importlib.util
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from drivetrain.errors import UsageError
from drivetrain_megatron.pipeline.cut import balanced, listed
from drivetrain_megatron.pipeline.stages import split
from drivetrain_megatron.recording.phases import record
from drivetrain_megatron.recording.proxy import StageProxy

VOCABULARY, WIDTH = 97, 12
ROOT = Path(__file__).parents[4]


def load_gpt():
    spec = importlib.util.spec_from_file_location("gpt", ROOT / "examples" / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT


def tokens(seed=0, length=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (3, length), generator=generator)


def padded(length=7):
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, length - 2 :] = 0
    return mask


class Encoder(nn.Module):
    def __init__(self, layers=5, layer=None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = layer or nn.TransformerEncoderLayer(WIDTH, 3, 20, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, mask=None):
        ignored = None if mask is None else mask == 0
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=ignored))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Pair(Residual):
    """Returns a tree: a second tensor travels, a mask is passed on, None stays."""

    def forward(self, state, mask):
        x, total = state["x"], state["total"]
        x = super().forward(x) * mask
        return {"x": x, "total": total + x.mean(-1), "mask": mask, "none": None}


class Pairs(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Pair() for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        mask = (x.sum(-1, keepdim=True) > 0).to(x.dtype)
        x = self.first(x)
        state = {"x": x, "total": x.mean(-1)}
        for layer in self.layers:
            state = layer(state, mask)
            mask = state["mask"]
        return {"y": state["x"] * self.scale + self.shift, "total": state["total"]}


class Between(nn.Module):
    """A parameter is used before every block, and one in every block and at the end."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(layers))
        self.shared = nn.Parameter(torch.randn(WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        for layer in self.layers[1:]:
            layer.up.bias = self.layers[0].up.bias

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = layer(norm(x) * self.shared)
        return x


def numbers(seed=0):
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def hugging_face(config, model, **options):
    def build():
        return model(
            config(
                vocab_size=VOCABULARY,
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=2,
                **{"use_cache": False, **options},
            )
        )

    return build


def llama(layers=4, **options):
    return hugging_face(
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        hidden_size=WIDTH,
        intermediate_size=20,
        num_hidden_layers=layers,
        num_attention_heads=3,
        **{"num_key_value_heads": 1, **options},
    )


SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {
    "n_embd": WIDTH,
    "n_layer": 4,
    "n_head": 3,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "loss_type": "ForCausalLM",
}
NEOX = {key: value for key, value in SIZES.items() if "prob" not in key}
LABELED = {"input_ids": tokens(), "attention_mask": padded(), "labels": tokens(1)}

MODELS = {
    "gpt": (lambda: load_gpt()(WIDTH, 4, 3, 16), (tokens(),), {}),
    "llama": (llama(), (), LABELED),
    "llama tied": (llama(tie_word_embeddings=True), (), {"input_ids": tokens()}),
    "gpt2": (
        hugging_face(transformers.GPT2Config, transformers.GPT2LMHeadModel, **GPT2),
        (),
        LABELED,
    ),
    "bert": (
        hugging_face(transformers.BertConfig, transformers.BertForMaskedLM, **SIZES),
        (),
        LABELED,
    ),
    "neox": (
        hugging_face(transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, **NEOX),
        (),
        LABELED,
    ),
    "t5": (
        hugging_face(
            transformers.T5Config,
            transformers.T5ForConditionalGeneration,
            d_model=WIDTH,
            d_ff=20,
            d_kv=4,
            num_layers=3,
            num_heads=3,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        ),
        (),
        LABELED,
    ),
    "cached": (llama(use_cache=True), (), LABELED),
    "encoder": (Encoder, (tokens(),), {"mask": padded()}),
    "sequential": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Residual() for _ in range(4))),
        (numbers(),),
        {},
    ),
    "tree": (Pairs, (numbers(),), {}),
    "between": (Between, (numbers(),), {}),
}


def build(factory):
    torch.manual_seed(3)
    model = factory().double()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def floats(output):
    if isinstance(output, torch.Tensor):
        return [output]
    return [value for value in output.values() if torch.is_tensor(value)]


def loss_of(output):
    return sum(
        (value * torch.linspace(1, 2, value.numel()).view_as(value)).sum()
        for value in floats(output)
    )


def stage_models(model, recording, cut, owners=None):
    """Return a (copy of the model, its Split) per rank."""
    owners = owners or [[stage] for stage in range(cut.stages)]
    parts = []
    for owned in owners:
        own = copy.deepcopy(model)
        parts.append((own, split(own, recording, cut, owned)))
    return parts


def forward_all(parts, args, kwargs):
    """Run the stages in order; return (stage, received, output) of each."""
    stages = sorted((s for _, part in parts for s in part.stages), key=lambda s: s.index)
    received, ran = (), []
    for stage in stages:
        expected = stage.receives(args, kwargs)
        assert [(tuple(t.shape), t.dtype) for t in received] == [m[:2] for m in expected]
        received = tuple(
            t.detach().clone().requires_grad_(m.requires_grad)
            for t, m in zip(received, expected, strict=True)
        )
        result = stage.run(args, kwargs, [t.view_as(t) for t in received])
        ran.append((stage, received, result))
        received = result.sent
    return ran


def backward_all(ran, loss):
    """Run the backward of each stage, last first, with the gradients of what it sent."""
    roots, seeds = [loss], [None]
    for position in reversed(range(len(ran))):
        torch.autograd.backward(roots, seeds)
        received = ran[position][1]
        used = [i for i, tensor in enumerate(received) if tensor.grad is not None]
        seeds = [received[i].grad for i in used]
        roots = [ran[position - 1][2].sent[i] for i in used]


def gradients(parts):
    total = {}
    for model, _ in parts:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad
    return total


def assert_equal_to_whole(model, parts, args, kwargs):
    whole = copy.deepcopy(model)
    expected = whole(*args, **kwargs)
    loss_of(expected).backward()
    ran = forward_all(parts, args, kwargs)
    found = ran[-1][2].output
    for a, b in zip(floats(found), floats(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    backward_all(ran, loss_of(found))
    got = gradients(parts)
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(got[name], parameter.grad, rtol=1e-10, atol=1e-12)
    assert set(got) == {n for n, p in whole.named_parameters() if p.grad is not None}
    return ran


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", list(MODELS))
def test_stages_equal_the_whole_model(name, stages):
    factory, args, kwargs = MODELS[name]
    model = build(factory)
    recording = record(model, args, kwargs)
    parts = stage_models(model, recording, balanced(recording, stages))
    ran = assert_equal_to_whole(model, parts, args, kwargs)
    for stage, _, result in ran:
        values = floats(result.output)
        assert any(type(value) is StageProxy for value in values) == (not stage.is_last)
        assert all(value.requires_grad for value in values)
    names = [
        n
        for own, part in parts
        for n, _ in own.named_parameters()
        if n not in part.stages[0].copies
    ]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters()), "each has one owner"


@pytest.mark.parametrize("name", ["gpt", "llama", "tree", "between", "bert"])
def test_two_chunks_per_rank(name):
    factory, args, kwargs = MODELS[name]
    model = build(factory)
    recording = record(model, args, kwargs)
    parts = stage_models(model, recording, balanced(recording, 4), [[0, 2], [1, 3]])
    assert_equal_to_whole(model, parts, args, kwargs)


@pytest.mark.parametrize("meta_first", [False, True])
def test_seven_blocks_over_three_stages(meta_first):
    model = build(llama(layers=7))
    recording = record(copy.deepcopy(model).to("meta") if meta_first else model, (), LABELED)
    cut = balanced(recording, 3)
    assert sorted(len(cut.blocks(stage)) for stage in range(3)) in ([2, 2, 3], [1, 3, 3])
    assert_equal_to_whole(model, stage_models(model, recording, cut), (), LABELED)


def test_other_shapes_need_no_preparation():
    model = build(llama())
    recording = record(model, (), LABELED)
    parts = stage_models(model, recording, balanced(recording, 2))
    for length in (5, 3, 9, 4):
        batch = {"input_ids": tokens(length, length), "labels": tokens(1, length)}
        for own, _ in parts:
            own.zero_grad()
        assert_equal_to_whole(model, parts, (), batch)


class Pooling(Residual):
    def forward(self, x):
        return super().forward(x)[:, ::2]


def test_blocks_that_change_the_shape():
    model = build(lambda: nn.Sequential(*(Pooling() for _ in range(3))))
    recording = record(model, (numbers(),), {})
    parts = stage_models(model, recording, balanced(recording, 3))
    for length in (5, 9, 4, 12):
        x = torch.randn(2, length, WIDTH, dtype=torch.float64)
        for own, _ in parts:
            own.zero_grad()
        assert_equal_to_whole(model, parts, (x,), {})


def test_memory_of_other_stages_is_free():
    model = build(llama())
    recording = record(model, (), LABELED)
    references = {name: weakref.ref(p) for name, p in model.named_parameters()}
    part = split(model, recording, balanced(recording, 2), [1])
    gone = {name for name, reference in references.items() if reference() is None}
    assert {n.split(".")[2] for n in gone if "layers" in n} == {
        str(i) for i in range(part.stages[0].blocks.start)
    }
    assert "model.embed_tokens.weight" in gone
    assert set(model.state_dict()) == set(references) - gone
    assert type(model.model.embed_tokens.weight) is StageProxy


def test_ties_are_reported_on_both_stages():
    model = build(MODELS["gpt2"][0])
    recording = record(model, (), LABELED)
    (_, first), (_, second), (_, last) = stage_models(model, recording, balanced(recording, 3))
    (tie,) = first.ties
    assert (tie.name, tie.owner, tie.copies) == ("transformer.wte.weight", 0, (2,))
    assert (first.stages[0].copies, second.stages[0].copies) == ((), ())
    assert last.stages[0].copies == ("transformer.wte.weight",)
    assert first.stages[0].ties == last.stages[0].ties == (tie,)
    assert second.stages[0].ties == ()


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        kept = []
        for i, layer in enumerate(self.layers):
            x = layer(x + kept[1] if i == 3 else x)
            kept.append(x)
        return x


def test_a_skip_connection_is_carried_through_the_stages_between():
    model = build(Skip)
    recording = record(model, (numbers(),), {})
    for layout in ([1, 1, 1, 1], [2, 2], [3, 1]):
        cut = listed(recording, len(layout), layout)
        assert_equal_to_whole(model, stage_models(model, recording, cut), (numbers(),), {})


class OuterResidual(Skip):
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x * 2


class InPlaceResidual(Skip):
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x += layer(x * 2)  # the layer keeps its input for backward
        return x * 2


class Forgetful(Skip):
    """The first sum takes the place of a tensor that is used again."""

    def forward(self, x):
        kept = x = self.first(x)
        for layer in self.layers:
            x = F.relu(x, inplace=True) + layer(x)
        return x + kept


class Biased(Skip):
    """A tensor made of parameters goes into every block's input."""

    def forward(self, x):
        bias = self.first.bias.exp()
        for layer in self.layers:
            x = layer(x + bias)
        return x


class Shared(Skip):
    """One block is called again and again."""

    def forward(self, x):
        for _ in range(2):
            for layer in self.layers[:2]:
                x = layer(x)
            x = self.layers[3](self.layers[2](x))
        return self.first(x)


@pytest.mark.parametrize("net", [OuterResidual, InPlaceResidual, Forgetful, Biased, Shared])
@pytest.mark.parametrize("layout", [[1, 3], [2, 1, 1], [1, 1, 1, 1]])
def test_tensors_of_the_code_around_blocks_cross(net, layout):
    model = build(net)
    recording = record(model, (numbers(),), {})
    calls = len(recording.blocks)
    layout = [*layout[:-1], calls - sum(layout[:-1])]
    cut = listed(recording, len(layout), layout)
    assert_equal_to_whole(model, stage_models(model, recording, cut), (numbers(),), {})


class Sometimes(Skip):
    """The skip connection appears after the recording."""

    skips = False

    def forward(self, x):
        return super().forward(x) if self.skips else nn.Sequential(self.first, *self.layers)(x)


def test_a_skip_connection_may_come_after_the_recording():
    model = build(Sometimes)
    recording = record(model, (numbers(),), {})
    parts = stage_models(model, recording, listed(recording, 3, [1, 2, 1]))
    for part in (model, *(part for part, _ in parts)):
        part.skips = True
    assert_equal_to_whole(model, parts, (numbers(),), {})


def test_other_calls_than_recorded_are_refused():
    class Choosy(Skip):
        order = (0, 1, 2, 3)

        def forward(self, x):
            for i in self.order:
                x = self.layers[i](x)
            return x

    model = build(Choosy)
    recording = record(model, (numbers(),), {})
    stage = split(model, recording, balanced(recording, 2), [0]).stages[0]
    for order in ((0, 2, 1, 3), (0, 1, 2), (0, 1, 2, 3, 3)):
        model.order = order
        with pytest.raises(UsageError, match="as in the recording"):
            stage.run((numbers(),), {})


def test_wrong_tensors_are_not_received():
    model = build(MODELS["sequential"][0])
    recording = record(model, (numbers(),), {})
    stage = split(model, recording, balanced(recording, 2), [1]).stages[0]
    with pytest.raises(UsageError, match="stage 1 to receive"):
        stage.run((numbers(),), {}, ())


def test_no_gradients_and_inference_mode():
    model = build(llama())
    recording = record(model, (), LABELED)
    parts = stage_models(model, recording, balanced(recording, 2))
    expected = model(**LABELED).loss
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            received = parts[0][1].stages[0].run((), LABELED).sent
            found = parts[1][1].stages[0].run((), LABELED, received).output.loss
        assert not found.requires_grad
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("own", [True, False])
def test_recomputed_blocks_send_once(own):
    class Recomputed(Skip):
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=not own)
            return x

    model = build(Recomputed)
    recording = record(model, (numbers(),), {})
    parts = stage_models(model, recording, balanced(recording, 2))
    if own:
        assert_equal_to_whole(model, parts, (numbers(),), {})
    else:
        with pytest.raises(UsageError, match="use_reentrant=False"):
            parts[0][1].stages[0].run((numbers(),), {})


def test_hugging_face_checkpointing():
    model = build(llama())
    model.activation_checkpointing_enable()
    model.train()
    recording = record(model, (), LABELED)
    parts = stage_models(model, recording, balanced(recording, 2))
    assert_equal_to_whole(model, parts, (), LABELED)


def test_hooks_of_other_stages_do_not_run():
    model = build(MODELS["sequential"][0])
    ran = []
    for i in (1, 4):
        model[i].register_forward_hook(lambda m, args, out, i=i: ran.append(i))
    recording = record(model, (numbers(),), {})
    ran.clear()
    split(model, recording, balanced(recording, 2), [0]).stages[0].run((numbers(),), {})
    assert 4 not in ran


def test_autocast():
    model = build(llama()).float()
    recording = record(model, (), LABELED)
    parts = stage_models(model, recording, balanced(recording, 3))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**LABELED).loss
        ran = forward_all(parts, (), LABELED)
    torch.testing.assert_close(ran[-1][2].output.loss, expected)


def test_a_cache_from_outside_is_refused():
    model = build(llama())
    recording = record(model, (), LABELED)
    stage = split(model, recording, balanced(recording, 2), [0]).stages[0]
    with pytest.raises(UsageError, match="use_cache=False"):
        stage.run(
            (), {**LABELED, "past_key_values": transformers.DynamicCache(), "use_cache": True}
        )


def test_after_close_values_are_missed_clearly():
    model = build(MODELS["sequential"][0])
    recording = record(model, (numbers(),), {})
    part = split(model, recording, balanced(recording, 2), [0])
    part.close()
    assert "forward" not in model[1].__dict__
    with pytest.raises(UsageError, match="another pipeline stage"):
        model(numbers()).sum().item()


def test_ambient_recomputation_is_small():
    options = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=512, num_hidden_layers=8, num_key_value_heads=4, use_cache=False, **options
        )
    )
    ids = torch.randint(0, 512, (8, 256))
    recording = record(model, (), {"input_ids": ids})
    stage = split(model, recording, balanced(recording, 2), [0]).stages[0]
    stage.run((), {"input_ids": ids})

    class Elements(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            self.made += sum(leaf.numel() for leaf in tree_leaves(result) if torch.is_tensor(leaf))
            return result

    def elements(call):
        with Elements() as counted:
            call((), {"input_ids": ids})
        return counted.made

    whole, ambient = elements(stage.run), elements(stage.run_ambient)
    assert 0 < ambient < 0.05 * whole, f"{ambient} of {whole} elements"


def test_loss_outside_of_the_model_is_a_proxy():
    model = build(MODELS["gpt"][0])
    recording = record(model, (tokens(),), {})
    output = split(model, recording, balanced(recording, 2), [0]).stages[0].run((tokens(),), {})
    loss = F.cross_entropy(output.output.flatten(0, 1), tokens(1).flatten())
    assert loss.requires_grad
    assert loss.shape == ()


def test_chunks_of_a_rank_leave_each_others_statistics_alone():
    class Normed(Between):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

        def forward(self, x):
            return self.last(super().forward(self.first(x)))

    model = build(Normed)
    recording = record(model, (numbers(),), {})
    parts = stage_models(model, recording, balanced(recording, 4), [[0, 2], [1, 3]])
    assert_equal_to_whole(model, parts, (numbers(),), {})
    model(numbers())
    (first, _), (last, _) = parts
    found = {**first.state_dict(), **last.state_dict()}
    for name in ("first.running_mean", "last.running_mean"):
        torch.testing.assert_close(found[name], model.state_dict()[name], rtol=1e-10, atol=0)
    assert "last.running_mean" not in first.state_dict()
    assert "first.running_mean" not in last.state_dict()


def test_a_frozen_stage_sends_without_history():
    model = build(llama())
    for parameter in (*model.model.embed_tokens.parameters(), *model.model.layers[0].parameters()):
        parameter.requires_grad_(False)
    recording = record(model, (), LABELED)
    parts = stage_models(model, recording, listed(recording, 3, [1, 1, 2]))
    assert [m.requires_grad for m in parts[1][1].stages[0].receives((), LABELED)] == [False]
    stages = [part.stages[0] for _, part in parts]
    sent = stages[0].run((), LABELED).sent
    assert not sent[0].requires_grad
    sent = stages[1].run((), LABELED, sent).sent
    sent = [sent[0].detach().requires_grad_()]
    stages[2].run((), LABELED, sent).output.loss.backward()
    assert sent[0].grad is not None


def test_an_encoder_in_eval_mode_with_padding():
    model = build(Encoder).eval()
    model.encoder.use_nested_tensor = model.encoder.enable_nested_tensor = True
    args = (tokens(), padded())
    recording = record(model, args, {})
    assert model.encoder.use_nested_tensor
    parts = stage_models(model, recording, balanced(recording, 2))
    with torch.no_grad():
        found = forward_all(parts, args, {})[-1][2].output
    expected = model(*args).detach()
    real = padded().bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-10, atol=1e-12)


def test_proxies_need_no_gradient_where_gradients_are_off():
    model = build(MODELS["sequential"][0])
    recording = record(model, (numbers(),), {})
    stage = split(model, recording, balanced(recording, 2), [0]).stages[0]
    assert stage.run((numbers(),), {}).output.requires_grad
    with torch.no_grad():
        assert not stage.run((numbers(),), {}).output.requires_grad


def test_a_copy_inside_of_a_pass_is_no_block_of_it():
    class Taught(Between):
        teacher = None

        def forward(self, x):
            if self.teacher is not None:
                self.seen = self.teacher[0](x)
            return super().forward(x)

    model = build(Taught)
    recording = record(model, (numbers(),), {})
    stage = split(model, recording, balanced(recording, 2), [0]).stages[0]
    model.teacher = [copy.deepcopy(model.layers[0])]
    stage.run((numbers(),), {})
    assert torch.equal(model.seen, model.layers[0](numbers()))


def test_a_copy_of_a_stage_computes_with_its_own_parameters():
    model = build(MODELS["sequential"][0])
    recording = record(model, (numbers(),), {})
    split(model, recording, balanced(recording, 2), [0])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(copied[1](numbers()), numbers())
    assert not torch.equal(model[1](numbers()), numbers())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
def test_compiled_blocks():
    model = build(Between)
    args = (numbers(),)
    expected = model(*args)
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend="eager")
    recording = record(model, args, {})
    assert recording.blocks[1].name == "layers.1"
    first = split(copy.deepcopy(model), recording, balanced(recording, 2), [0]).stages[0]
    last = split(model, recording, balanced(recording, 2), [1]).stages[0]
    found = last.run(args, {}, first.run(args, {}).sent).output
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert set(model.state_dict()).isdisjoint(["layers.0._orig_mod.up.weight"])
