"""Parameters: scripts count, read, write, hook and copy them between steps."""

import copy
import io
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from way_kit import LENGTH, Loop, after, hooked

WHOLE = torch.arange(2 * LENGTH).view(2, LENGTH)


# --- facts ---


def elements_and_shapes_counted(loop: Loop) -> None:
    model, _ = loop.ready()
    loop.note("all", sum(p.numel() for p in model.parameters()))
    loop.note("trained", sum(p.nelement() for p in model.parameters() if p.requires_grad))
    for name, parameter in model.named_parameters():
        loop.note(name, torch.tensor([*parameter.shape, *parameter.size(), parameter.dim()]))


# --- hooks ---


def a_hook_from_before_keeps_old_words(loop: Loop) -> None:
    def keep(gradient: Tensor) -> Tensor:
        kept = gradient.clone()
        kept[: len(kept) // 2] = 0
        return kept

    hooked(loop, keep, before=True, steps=2)


def a_hook_from_after_writes_in_place(loop: Loop) -> None:
    def write(gradient: Tensor) -> None:
        gradient[-1] = 0

    hooked(loop, write, before=False, steps=2)


def a_hook_weighs_each_element(loop: Loop) -> None:
    def weigh(gradient: Tensor) -> Tensor:
        return gradient * torch.linspace(0, 2, gradient.numel()).view(gradient.shape)

    hooked(loop, weigh, before=True, steps=2)


# --- reading ---


@after
def read_in_each_way(loop: Loop, step: int, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        loop.note(f"{name} norm {step}", parameter.norm())
        loop.note(f"{name} data {step}", parameter.data.abs().max())
        loop.note(f"{name} numpy {step}", parameter.detach().cpu().numpy().sum())
        loop.note(f"{name} row {step}", parameter[0].detach())


def a_penalty_in_the_loss(loop: Loop) -> None:
    model, optimizer = loop.ready()
    for step in range(2):
        loss = loop.loss(model, loop.batch(step))
        loss = loss + 0.1 * sum(p.pow(2).sum() for p in model.parameters())
        loop.note(f"penalty {step}", sum(p.pow(2).sum() for p in model.parameters()))
        loop.step(optimizer, loss)
    loop.weights(model)


def an_average_from_before_follows_detached(loop: Loop) -> None:
    model = loop.model()
    average = copy.deepcopy(model)
    model, optimizer = loop.prepare(model, SGD(model.parameters(), lr=0.5))
    for step in range(3):
        loop.step(optimizer, loop.loss(model, loop.batch(step)))
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 0.3)
    for name, tensor in average.state_dict().items():
        loop.note(name, tensor)


def a_vector_of_all_parameters(loop: Loop) -> None:
    model, _ = loop.ready()
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    loop.note("vector", vector)
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    loop.weights(model)


# --- state dicts ---


@after
def a_state_dict_written_and_read(loop: Loop, step: int, model: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for name, tensor in torch.load(file, weights_only=True).items():
        loop.note(f"{name} {step}", tensor)


def a_state_dict_kept_and_loaded_again(loop: Loop) -> None:
    model, optimizer = loop.ready()
    for step in range(3):
        loop.step(optimizer, loop.loss(model, loop.batch(step)))
        if step == 0:
            kept = copy.deepcopy(model.state_dict())
        if step == 1:
            model.load_state_dict(kept)
    loop.weights(model)


# --- writing ---


@after
def weights_clamped_after_each_step(loop: Loop, step: int, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.5, 0.5)


@after
def rows_written_and_drawn_anew(loop: Loop, step: int, model: nn.Module) -> None:
    model.first.weight.data[3] = 0.25
    with torch.no_grad():
        model.blocks[0].up.weight[2:9].mul_(0.5)
        nn.init.constant_(model.last.bias, 0.1 * step)
        model.last.weight.copy_(torch.linspace(-1, 1, 256).view(32, 8))


@after
def averages_swapped_in_by_data(loop: Loop, step: int, model: nn.Module) -> None:
    """As an EMA lends its weights for an evaluation, and takes them back."""
    kept = [p.data for p in model.parameters()]
    for parameter in model.parameters():
        parameter.data = torch.full(tuple(parameter.shape), 0.01)
    with torch.no_grad():
        loop.note(f"lent {step}", model(loop.batch(step))[0])
    for parameter, values in zip(model.parameters(), kept, strict=True):
        parameter.data = values


@after
def weights_averaged_by_torch(loop: Loop, step: int, model: nn.Module) -> None:
    """As loops do that average weights in place of gradients."""
    loop.note(f"largest {step}", max(parameter.abs().max() for parameter in model.parameters()))
    for parameter in () if loop.alone else model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


# --- copies ---


def a_copy_is_averaged_and_evaluated(loop: Loop) -> None:
    model, optimizer = loop.ready()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for step in range(3):
        loop.step(optimizer, loop.loss(model, loop.batch(step)))
        average.update_parameters(model)
    with torch.no_grad():
        loop.note("outputs", average(torch.arange(8).view(2, 4))[0])
    for name, tensor in average.module.state_dict().items():
        loop.note(name, tensor)


def ranks_draw_other_first_values(loop: Loop) -> None:
    """As a script without a seed; those of rank 0 count."""
    loop.begin()
    model = loop.model()
    if not loop.alone and not loop.accelerator.is_main_process:
        for parameter in model.parameters():
            nn.init.uniform_(parameter)
    model, optimizer = loop.prepare(model, SGD(model.parameters(), lr=0.5))
    loop.train(model, optimizer, 2)


# --- other values in the place of parameters ---


def _with_other_values(loop: Loop, call: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> None:
    """Call a model with other values than its own between two steps, and train on."""
    model, optimizer = loop.ready()
    for step in range(2):
        whole = model.state_dict() if loop.alone else loop.accelerator.get_state_dict(model)
        loop.note(f"called {step}", call(model, {name: 1.5 * t for name, t in whole.items()}))
        loop.step(optimizer, loop.loss(model, loop.batch(step)))
    loop.weights(model)


def called_with_other_values(loop: Loop) -> None:
    def call(model: nn.Module, values: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return functional_call(model, values, (WHOLE,))

    _with_other_values(loop, call)


def called_with_another_bias(loop: Loop) -> None:
    def call(model: nn.Module, values: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return functional_call(model, {"blocks.0.up.bias": values["blocks.0.up.bias"]}, WHOLE)

    _with_other_values(loop, call)


def gradients_of_a_function_of_values(loop: Loop) -> None:
    def call(model: nn.Module, values: dict[str, Tensor]) -> Tensor:
        def loss(values: dict[str, Tensor]) -> Tensor:
            return functional_call(model, values, (WHOLE,)).square().mean()

        return torch.func.grad(loss)(values)["last.weight"]

    _with_other_values(loop, call)


def a_copy_made_of_whole_parameters_is_called(loop: Loop) -> None:
    model, _ = loop.ready()
    with nullcontext() if loop.alone else loop.accelerator.gathered(model):
        average = AveragedModel(model)
    average.update_parameters(model)
    with torch.no_grad():
        loop.note("outputs", average(WHOLE))


def adapters_are_merged_and_saved(loop: Loop) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about names of its own
        _merge_and_save(loop)


def _merge_and_save(loop: Loop) -> None:
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    base = GPT2LMHeadModel(GPT2Config(**sizes, **tokens, attn_implementation="eager"))
    adapters = LoraConfig(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    adapters.init_lora_weights = False
    model = get_peft_model(base, adapters)
    model.example_inputs = {"input_ids": WHOLE}
    merged = loop.prepare(model).merge_and_unload()
    folder = loop.folder()
    merged.save_pretrained(folder)
    loop.folder()  # the first rank has written
    for name, tensor in load_file(folder / "model.safetensors").items():
        loop.note(name, tensor)
