"""Gradients: between backward and step scripts clear, keep, assign, edit and measure them."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from way_kit import Loop, Way, between


def _edits(edit: Callable[[Tensor], object]) -> Way:
    @between
    def way(loop: Loop, step: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                edit(parameter.grad)

    return way


def _each(change: Callable[[nn.Parameter], object]) -> Way:
    @between
    def way(loop: Loop, step: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            change(parameter)

    return way


def _replaces(make: Callable[[nn.Parameter], Tensor | None]) -> Way:
    return _each(lambda parameter: setattr(parameter, "grad", make(parameter)))


def _clears(clear: Callable[[nn.Module], object]) -> Way:
    """Return a way of three steps with this after each of them."""

    def way(loop: Loop) -> None:
        model, optimizer = loop.ready()
        for step in range(3):
            loop.backward(loop.loss(model, loop.batch(step)))
            optimizer.step()
            clear(model)
        loop.weights(model)

    return way


# --- clearing ---


@_clears
def cleared_by_none(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def cleared_by_none_before_backward_with_momentum(loop: Loop) -> None:
    model, optimizer = loop.ready(lambda m: SGD(m.parameters(), lr=0.5, momentum=0.9))
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        loop.backward(loop.loss(model, loop.batch(step)))
        optimizer.step()
    loop.weights(model)


@_clears
def cleared_by_zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.detach_()
        parameter.grad.zero_()


@_clears
def cleared_by_data_zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.data.zero_()


cleared_by_the_model_to_zeros = _clears(lambda model: model.zero_grad(set_to_none=False))


not_cleared_at_all = _clears(lambda model: None)


def a_layer_kept_from_a_step_by_none(loop: Loop) -> None:
    model, optimizer = loop.ready(lambda m: AdamW(m.parameters(), lr=0.02))
    for step in loop.steps(model, optimizer, 3):
        for parameter in model.last.parameters() if step < 2 else ():
            parameter.grad = None


@_clears
def one_layer_cleared_and_the_others_added_up(model: nn.Module) -> None:
    model.last.weight.grad = None


def a_second_backward_adds(loop: Loop) -> None:
    model, optimizer = loop.ready()
    for step in loop.steps(model, optimizer, 3):
        loop.backward(loop.loss(model, loop.batch(step + 7)) * 0.5)


def cleared_in_mid_window(loop: Loop) -> None:
    """The first micro-batch of each window is thrown away."""
    loop.begin(gradient_accumulation_steps=2)
    model, optimizer = loop.ready()
    for number in range(4):
        with loop.accumulate(model):
            loss = loop.loss(model, loop.batch(number))
            loop.backward(loss / 2 if loop.alone else loss)
            if number % 2 == 0:
                for parameter in model.parameters():
                    parameter.grad = None
            if not loop.alone or number % 2:
                optimizer.step()
                optimizer.zero_grad()
    loop.weights(model)


# --- presence ---


def counted_where_none(loop: Loop) -> None:
    model = loop.model()
    model.unused = nn.Linear(8, 8)
    model, optimizer = loop.prepare(model, SGD(model.parameters(), lr=0.5))
    for step in range(2):
        loop.note(f"before {step}", sum(p.grad is not None for p in model.parameters()))
        loop.backward(loop.loss(model, loop.batch(step)))
        loop.note(f"after {step}", sum(p.grad is not None for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    loop.weights(model)


@between
def facts_of_a_gradient(loop: Loop, step: int, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad.shape == parameter.shape
        assert grad.dtype == parameter.dtype
        assert grad.device == parameter.device
        assert not grad.requires_grad
        loop.note(f"{name} {step}", grad.numel() + grad.dim())


# --- assigning ---


whole_tensors_assigned = _replaces(lambda p: torch.linspace(-1, 1, p.numel()).view(p.shape))


def whole_tensors_assigned_without_a_backward(loop: Loop) -> None:
    """As evolution strategies do."""
    model, optimizer = loop.ready(lambda m: AdamW(m.parameters(), lr=0.02))
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.linspace(-1, step, parameter.numel()).view(parameter.shape)
        optimizer.step()
        optimizer.zero_grad()
    loop.weights(model)


replaced_by_a_product = _replaces(lambda p: p.grad * 0.5)


replaced_by_a_clone = _replaces(lambda p: p.grad.clone().detach())


replaced_by_its_sign = _replaces(lambda p: torch.sign(p.grad))


def swapped_between_two_backwards(loop: Loop) -> None:
    """As gradient surgery of several tasks does: kept, cleared, and put together again."""
    model, optimizer = loop.ready()
    for step in range(2):
        kept = []
        for task in range(2):
            loop.backward(loop.loss(model, loop.batch(step + 5 * task)))
            kept.append([p.grad.clone() for p in model.parameters()])
            optimizer.zero_grad()
        for parameter, one, two in zip(model.parameters(), *kept, strict=True):
            parameter.grad = one + 0.5 * two
        optimizer.step()
        optimizer.zero_grad()
    loop.weights(model)


# --- editing ---


scaled = _edits(lambda g: g.mul_(0.3))


@_each
def scaled_by_an_operator(parameter: nn.Parameter) -> None:
    parameter.grad /= 3


scaled_through_data = _edits(lambda g: g.data.mul_(torch.tensor(0.3)))


clamped = _edits(lambda g: g.clamp_(-0.01, 0.01))


cleaned_of_nan = _edits(lambda g: torch.nan_to_num_(g, nan=0.0))


masked = _edits(lambda g: g.masked_fill_(torch.arange(g.numel()).view(g.shape) % 3 == 0, 0.0))


@between
def multiplied_by_a_mask_of_rows(loop: Loop, step: int, model: nn.Module) -> None:
    model.first.weight.grad.mul_((torch.arange(32) >= 16).to(torch.float64)[:, None])


@between
def rows_written_by_index(loop: Loop, step: int, model: nn.Module) -> None:
    """As new words of a table are trained alone."""
    model.first.weight.grad[:16] = 0
    model.last.weight.grad[3, 2:5] = torch.tensor([1.0, 2.0, 3.0])
    model.blocks[0].up.weight.grad.fill_diagonal_(0.5)


@between
def rows_written_by_a_view(loop: Loop, step: int, model: nn.Module) -> None:
    model.first.weight.grad[:16].zero_()


@_each
def weights_added_as_decay(parameter: nn.Parameter) -> None:
    parameter.grad.add_(parameter.detach(), alpha=0.1)


@between
def weights_added_to_all_at_once(loop: Loop, step: int, model: nn.Module) -> None:
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
    torch._foreach_add_([p.grad for p in model.parameters()], 0.01)


@between
def noise_drawn_in_place(loop: Loop, step: int, model: nn.Module) -> None:
    torch.manual_seed(step)
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)


@between
def noise_drawn_from_one_seed(loop: Loop, step: int, model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)


def unscaled_by_torch(loop: Loop) -> None:
    """With torch's scale of losses; a gradient of the second step is infinite."""
    model, optimizer = loop.ready(lambda m: AdamW(m.parameters(), lr=0.02))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        loop.backward(scaler.scale(loop.loss(model, loop.batch(step))))
        if step == 1:
            model.last.bias.grad[-1] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    loop.note("scale", scaler.get_scale())
    loop.weights(model)


@between
def averaged_once_more_by_torch(loop: Loop, step: int, model: nn.Module) -> None:
    """As loops of before DistributedDataParallel do."""
    gradients = [parameter.grad.data for parameter in model.parameters()]
    loop.note(f"largest {step}", max(gradient.abs().max() for gradient in gradients))
    for gradient in () if loop.alone else gradients:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())


# --- measuring ---


@between
def clipped_by_torch(loop: Loop, step: int, model: nn.Module) -> None:
    loop.note(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@between
def clipped_by_torch_to_the_largest(loop: Loop, step: int, model: nn.Module) -> None:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))
    loop.note(f"norm {step}", norm)


@between
def clipped_by_torch_in_two_groups(loop: Loop, step: int, model: nn.Module) -> None:
    for index, part in enumerate((model.blocks, model.last)):
        loop.note(f"norm {step} {index}", nn.utils.clip_grad_norm_(part.parameters(), 0.05))


@between
def clipped_by_value_by_torch(loop: Loop, step: int, model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


@between
def measured_by_torch(loop: Loop, step: int, model: nn.Module) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    loop.note(f"norm {step}", nn.utils.get_total_norm(gradients))
    loop.note(f"norms {step}", torch.stack(torch._foreach_norm(gradients)))


@between
def norm_written_by_hand(loop: Loop, step: int, model: nn.Module) -> None:
    """As many scripts write it, in each of the ways."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    ways = {
        "items": sum(g.data.norm(2).item() ** 2 for g in gradients) ** 0.5,
        "pow": sum(g.detach().pow(2).sum() for g in gradients).sqrt(),
        "abs": sum(g.abs().sum() for g in gradients),
        "max": max(g.abs().max() for g in gradients),
        "vector": torch.cat([g.flatten() for g in gradients]).norm(),
        "mean": torch.stack([g.mean() for g in gradients]),
    }
    for name, value in ways.items():
        loop.note(f"{name} {step}", value)


@between
def looked_at_for_nan(loop: Loop, step: int, model: nn.Module) -> None:
    fine = all(torch.isfinite(p.grad).all() for p in model.parameters())
    loop.note(f"fine {step}", fine)
    loop.note(f"nan {step}", sum(int(p.grad.isnan().sum()) for p in model.parameters()))


@between
def read_as_numbers(loop: Loop, step: int, model: nn.Module) -> None:
    loop.note(f"numpy {step}", torch.from_numpy(model.last.bias.grad.numpy().copy()))
    loop.note(f"list {step}", torch.tensor(model.last.bias.grad.tolist()))
    loop.note(f"cpu {step}", model.first.weight.grad.cpu().float().double())
    loop.note(f"row {step}", model.first.weight.grad[5])
    loop.note(f"equal {step}", torch.equal(gradient := model.last.weight.grad, gradient + 0))
    loop.note(f"loss {step}", nn.functional.mse_loss(gradient, torch.ones_like(gradient)))


def compared_between_tasks(loop: Loop) -> None:
    """As PCGrad looks at the angle between two gradients."""
    model, optimizer = loop.ready()
    for step in range(2):
        kept = []
        for task in range(2):
            loop.backward(loop.loss(model, loop.batch(step + 5 * task)))
            kept.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
            optimizer.zero_grad()
        loop.note(f"angle {step}", torch.dot(*kept))
        both, first = kept[0] + kept[1], 0
        for parameter in model.parameters():
            parameter.grad = both[first : first + parameter.numel()].view(parameter.shape)
            first += parameter.numel()
        optimizer.step()
        optimizer.zero_grad()
    loop.weights(model)


# --- used for other things ---


def a_sharpness_aware_step(loop: Loop) -> None:
    """SAM by hand: up along the gradient, backward again, and back."""
    model, optimizer = loop.ready()
    for step in loop.steps(model, optimizer):
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        loop.backward(loop.loss(model, loop.batch(step)))
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)


def an_adversarial_move_of_weights(loop: Loop) -> None:
    """AWP: weights move along the gradient's sign, and are put back."""
    model, optimizer = loop.ready()
    for step in loop.steps(model, optimizer):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data.add_(0.01 * parameter.grad.sign())
        loop.backward(loop.loss(model, loop.batch(step)))
        for name, parameter in model.named_parameters():
            parameter.data.copy_(before[name])


def gradients_kept_from_the_first_step(loop: Loop) -> None:
    """A reference to ``p.grad`` across steps, as a memory of gradients keeps."""
    model, optimizer = loop.ready()
    memory: list[Tensor] = []
    for _ in loop.steps(model, optimizer, 3):
        memory = memory or [p.grad for p in model.parameters()]
        for parameter, kept in zip(model.parameters(), memory, strict=True):
            parameter.grad.lerp_(kept, 0.5)


def gradients_compared_with_those_before(loop: Loop) -> None:
    """The angle between gradients of two steps, whose views are kept without a copy."""
    model, optimizer = loop.ready()
    before: list[Tensor] = []
    for step in loop.steps(model, optimizer, 3):
        now = [p.grad.detach().view(-1) for p in model.parameters()]
        pairs = zip(now, before or now, strict=True)
        loop.note(f"angle {step}", sum((one * other).sum() for one, other in pairs))
        before = now


def norms_of_cleared_gradients(loop: Loop) -> None:
    """Gradients that are measured when another one, or none, stands in their place."""
    model, optimizer = loop.ready(lambda m: SGD(m.parameters(), lr=0.5, momentum=0.9))
    before: list[Tensor] = []
    for step in loop.steps(model, optimizer, 3):
        now = [p.grad for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        loop.note(f"norm {step}", sum(each.norm() for each in now))
        loop.note(f"norm before {step}", sum(each.norm() for each in before or now))
        for parameter, grad in zip(model.parameters(), now, strict=True):
            parameter.grad = grad
        before = now


@between
def set_through_data(loop: Loop, step: int, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)
