"""State of optimizers: saved, loaded, read by parameter, reset; groups and hooks around steps."""

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from way_kit import Loop, Way


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return biases in the first group, by names; some of the parameters of each are one rank's."""
    named = list(model.named_parameters())
    return [
        {"params": [each for each in named if each[1].dim() == 1], "weight_decay": 0.0},
        {"params": [each for each in named if each[1].dim() > 1], "lr": 0.02},
    ]


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW(_groups(model), lr=0.01)


def _step(loop: Loop, model: nn.Module, optimizer: Optimizer, *steps: int) -> None:
    for step in steps:
        loop.step(optimizer, loop.loss(model, loop.batch(step)))


def _note(loop: Loop, optimizer: Optimizer, when: str = "") -> dict[str, Any]:
    """Note all numbers of a state dict, and return it."""
    saved = optimizer.state_dict()
    for number, state in saved["state"].items():
        for key, value in state.items():
            loop.note(f"{key} of {number}{when}", value)
    for index, group in enumerate(saved["param_groups"]):
        for name, number in zip(group["param_names"], group["params"], strict=True):
            loop.note(f"{name} in group {index}{when}", number)
        loop.note(f"lr of group {index}{when}", group["lr"])
    return saved


def _before_the_third_step(
    make: Callable[[nn.Module], Optimizer] = _adamw,
) -> Callable[[Callable[[Optimizer], object]], Way]:
    """Make a way of a change to an optimizer: three steps, and the state and weights behind."""

    def made(change: Callable[[Optimizer], object]) -> Way:
        def way(loop: Loop) -> None:
            model, optimizer = loop.ready(make)
            _step(loop, model, optimizer, 0, 1)
            change(optimizer)
            _step(loop, model, optimizer, 2)
            _note(loop, optimizer)
            loop.weights(model)

        return way

    return made


def a_state_dict_is_whole(loop: Loop) -> None:
    model, optimizer = loop.ready(_adamw)
    _note(loop, optimizer, " before the first step")
    _step(loop, model, optimizer, 0, 1)
    _note(loop, optimizer)


def a_state_dict_of_momentum_is_whole(loop: Loop) -> None:
    model, optimizer = loop.ready(lambda m: SGD(_groups(m), lr=0.1, momentum=0.9, nesterov=True))
    _step(loop, model, optimizer, 0, 1)
    _note(loop, optimizer)


def state_that_the_constructor_makes_is_whole(loop: Loop) -> None:
    model, optimizer = loop.ready(
        lambda m: Adagrad(_groups(m), lr=0.1, initial_accumulator_value=0.1)
    )
    _note(loop, optimizer, " before the first step")
    _step(loop, model, optimizer, 0, 1)
    _note(loop, optimizer)


def a_run_goes_back_to_a_state_dict(loop: Loop) -> None:
    model, optimizer = loop.ready(_adamw)
    _step(loop, model, optimizer, 0, 1)
    kept = copy.deepcopy(optimizer.state_dict())
    _step(loop, model, optimizer, 2, 3)
    optimizer.load_state_dict(kept)
    _note(loop, optimizer, " after loading")
    _step(loop, model, optimizer, 2, 3)
    loop.weights(model)


def a_state_dict_of_one_process_is_loaded(loop: Loop) -> None:
    alone = Loop(None)
    twin = alone.model()
    made = _adamw(twin)
    _step(alone, twin, made, 0, 1)
    model, optimizer = loop.ready(_adamw)
    optimizer.load_state_dict(made.state_dict())
    _note(loop, optimizer, " after loading")
    _step(loop, model, optimizer, 2)
    loop.weights(model)


def moments_are_read_by_parameter(loop: Loop) -> None:
    model, optimizer = loop.ready(_adamw)
    loop.note("parameters with state before a step", len(optimizer.state))
    _step(loop, model, optimizer, 0)
    count = 0
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            state = optimizer.state[parameter]
            loop.note(f"moment {number} of group {index}", state["exp_avg"].norm())
            loop.note(f"steps {number} of group {index}", state["step"])
            count += parameter in optimizer.state
    loop.note("parameters with state", len(optimizer.state))
    loop.note("parameters that are found", count)
    optimizer.state_dict()


def moments_are_summed_over_all_values(loop: Loop) -> None:
    model, optimizer = loop.ready(_adamw)
    _step(loop, model, optimizer, 0)
    loop.note("sum", sum(state["exp_avg_sq"].sum() for state in optimizer.state.values()))
    for index, (parameter, state) in enumerate(optimizer.state.items()):
        loop.note(f"elements {index}", state["exp_avg"].numel())
        loop.note(f"dims {index}", parameter.dim())


@_before_the_third_step()
def moments_of_a_group_are_reset(optimizer: Optimizer) -> None:
    for parameter in optimizer.param_groups[1]["params"]:
        optimizer.state[parameter] = {}


def all_moments_are_cleared(loop: Loop) -> None:
    model, optimizer = loop.ready(_adamw)
    _step(loop, model, optimizer, 0, 1)
    optimizer.state.clear()
    loop.note("parameters with state", len(optimizer.state))
    _step(loop, model, optimizer, 2)
    loop.weights(model)


@_before_the_third_step(lambda m: SGD(_groups(m), lr=0.1, momentum=0.9))
def state_is_replaced_by_an_empty_one(optimizer: Optimizer) -> None:
    """As Sentence-BERT and restarts of schedules do."""
    optimizer.state = defaultdict(dict)


@_before_the_third_step()
def moments_of_some_rows_are_assigned(optimizer: Optimizer) -> None:
    """As sparse autoencoders revive neurons."""
    parameter = optimizer.param_groups[1]["params"][0]
    state = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    state["exp_avg"][3:7] = 0
    optimizer.state[parameter] = state


@_before_the_third_step()
def moments_are_zeroed_in_place(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def elements_and_options_of_groups_are_read_and_set(loop: Loop) -> None:
    model, optimizer = loop.ready(_adamw)
    for index, group in enumerate(optimizer.param_groups):
        loop.note(f"parameters of group {index}", len(group["params"]))
        loop.note(f"trained in group {index}", sum(p.requires_grad for p in group["params"]))
        group["lr"] *= 0.5
        group["weight_decay"] = 0.1
    _step(loop, model, optimizer, 0, 1)
    _note(loop, optimizer)
    loop.weights(model)


def a_group_is_added_and_saved(loop: Loop) -> None:
    model = loop.model()
    model.last.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = loop.prepare(model, AdamW(trained))
    _step(loop, model, optimizer, 0)
    model.last.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.1})
    _step(loop, model, optimizer, 1, 2)
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            loop.note(f"{key} of {number}", value)
    optimizer.load_state_dict(optimizer.state_dict())
    _step(loop, model, optimizer, 3)
    loop.weights(model)


def hooks_run_once_for_each_step(loop: Loop) -> None:
    seen: list[Any] = []

    def noted(*arguments: Any) -> None:
        seen.append(arguments[0] is optimizer)

    model, optimizer = loop.ready(_adamw)
    handles = [
        optimizer.register_step_pre_hook(noted),
        optimizer.register_step_post_hook(noted),
        optimizer.register_state_dict_post_hook(noted),
        optimizer.register_load_state_dict_post_hook(noted),
    ]
    _step(loop, model, optimizer, 0, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    loop.note("calls", len(seen))
    loop.note("with the script's optimizer", all(seen))
    for handle in handles:
        handle.remove()
    _step(loop, model, optimizer, 2)
    loop.note("calls afterwards", len(seen))


def state_dicts_are_changed_by_hooks(loop: Loop) -> None:
    def halved(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        saved["param_groups"][0]["lr"] /= 2
        return saved

    model, optimizer = loop.ready(_adamw)
    optimizer.register_state_dict_post_hook(halved)
    optimizer.register_load_state_dict_pre_hook(halved)
    _step(loop, model, optimizer, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    loop.note("lr", optimizer.param_groups[0]["lr"])


def a_copy_of_the_optimizer_is_made(loop: Loop) -> None:
    model, optimizer = loop.ready(_adamw)
    _step(loop, model, optimizer, 0)
    twin = copy.deepcopy(optimizer)
    held: Tensor = twin.param_groups[0]["params"][0]
    loop.note("moment", twin.state[held]["exp_avg"])
