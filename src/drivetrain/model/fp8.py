"""``precision: fp8``: the matrix products of a model's blocks, by torchao, in 8 bits.

Inputs, weights and gradients of a product are scaled to the range of fp8 just before it; they lie
in memory as they did, so that optimizers and checkpoints never meet them in 8 bits, and strategies
only on the wire, by the recipe tensorwise_gathered: ``drivetrain.parallel.gather``.
(Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 3.)
"""

import dataclasses
import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.model.guard import Arguments, Function, Keywords
from drivetrain.model.modules import (
    clean_name,
    is_wrapped,
    repeated_blocks,
    unwrap_forward,
    wrap_forward,
)

logger = get_logger(__name__)

FP8_FORWARD = "_forward_before_fp8"
"""Where a layer whose products are in fp8 keeps the forward of before."""

MULTIPLE = 16
"""Both sizes of a matrix must be a multiple of it, as the products of the hardware want."""

FP8 = torch.float8_e4m3fn
"""The dtype of weights in products."""

GATHERED = "tensorwise_gathered"
"""The recipe tensorwise, with weights that are gathered in fp8 where they are divided."""

LEAST_LARGEST = 1e-12
"""Tensors whose largest magnitude is below are scaled as if it were this, in torchao."""

LEAST_CAPABILITY = {
    "tensorwise": (8, 9),
    GATHERED: (8, 9),
    "rowwise": (9, 0),
    "rowwise_with_gw_hp": (9, 0),
}
"""CUDA's compute capability of the first devices that have the products of a recipe."""

Filter = Callable[[nn.Module, str], bool]


class Layers(NamedTuple):
    """Which layers of a model compute in fp8, and why the other ``Linear`` do not.

    Attributes:
        chosen: by name.
        left: the reason, by name.
    """

    chosen: dict[str, nn.Linear]
    left: dict[str, str]


def compute_in_fp8(
    model: nn.Module,
    recipe: str,
    device: torch.device,
    *,
    config: Any = None,
    only: Filter | None = None,
) -> None:
    """Let the ``Linear`` layers of a model's blocks multiply in fp8; say which, and which not.

    Without blocks that repeat, all layers but the first and the last are looked at: these two cost
    most accuracy. On a CPU products are emulated in fp32.

    Args:
        model: changed in place; ``restore_products`` undoes it.
        recipe: tensorwise, tensorwise_gathered, rowwise or rowwise_with_gw_hp.
        device: where it will run.
        config: a ``Float8LinearConfig`` of torchao in the place of the recipe.
        only: called with a layer and its name; only where it is true, fp8 is used.

    Raises:
        UsageError: torchao is missing, the device has no such products, or no layer can.
    """
    chosen, left = choose_layers(model, only)
    if not chosen:
        why = ", ".join(f"{name}: {reason}" for name, reason in list(left.items())[:3])
        raise UsageError(
            f"precision: fp8: expected Linear layers in the blocks of {type(model).__name__} that "
            f"can compute in fp8, found none ({why or 'no Linear'}); take precision: bf16"
        )
    products = _products(recipe, device, config)
    for layer in chosen.values():
        wrap_forward(layer, FP8_FORWARD, products)
    emulated = ", emulated in fp32" if device.type == "cpu" else ""
    logger.announce(
        f"precision: fp8: {len(chosen)} of {len(chosen) + len(left)} Linear layers of "
        f"{type(model).__name__} compute in fp8 ({recipe if config is None else 'config'}"
        f"{emulated}){_told(left)}"
    )


def restore_products(model: nn.Module) -> None:
    """Give the layers of a model the products back that they had before ``compute_in_fp8``."""
    for module in model.modules():
        unwrap_forward(module, FP8_FORWARD)


def choose_layers(model: nn.Module, only: Filter | None = None) -> Layers:
    """Return which layers of a model compute in fp8, and why the others do not."""
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    in_blocks = {id(each) for _, block in repeated_blocks(model) for each in block.modules()}
    ends = set(list(linears)[:1] + list(linears)[-1:])
    layers = Layers({}, {})
    for name, layer in linears.items():
        outside = id(layer) not in in_blocks if in_blocks else name in ends
        reason = _reason(layer)
        if outside and only is None:
            reason = "outside of the blocks" if in_blocks else "first or last"
        elif reason is None and only is not None and not only(layer, name):
            reason = "left out by module_filter_func"
        if reason is None:
            layers.chosen[name] = layer
        else:
            layers.left[name] = reason
    return layers


def weights_in_fp8(model: nn.Module) -> set[str]:
    """Return the names of weights that nothing but a product in fp8 reads, as far as modules tell.

    Before ``compute_in_fp8`` those of the layers that it would take.
    """
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    found = {name: layer for name, layer in linears.items() if is_wrapped(layer, FP8_FORWARD)}
    held = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    return {
        clean_name(f"{name}.weight")
        for name, layer in (found or choose_layers(model).chosen).items()
        if held[id(layer._parameters["weight"])] == 1
    }


def _reason(layer: nn.Linear) -> str | None:
    """Return why a layer cannot compute in fp8."""
    if type(layer) is not nn.Linear or is_parametrized(layer) or "forward" in layer.__dict__:
        return "computes in a way of its own"
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        return f"sizes are no multiples of {MULTIPLE}"
    if layer.weight.dtype not in (torch.float32, torch.bfloat16):
        return f"given in {str(layer.weight.dtype).removeprefix('torch.')}"
    return None


def _told(left: dict[str, str]) -> str:
    """Return the layers that stay as they are in words, the names of each reason shortened."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        by_reason.setdefault(reason, []).append(name)
    words = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} ({reason})"
        for reason, names in by_reason.items()
    ]
    return f"; not {', '.join(words)}" if words else ""


def _products(recipe: str, device: torch.device, config: Any) -> "_Fp8Products":
    """Return the products of a recipe on a device, by torchao.

    Raises:
        UsageError: torchao cannot be loaded, or the device has no such products.
    """
    if device.type == "cuda":
        needed = LEAST_CAPABILITY["tensorwise" if config is not None else recipe]
        if (found := torch.cuda.get_device_capability(device)) < needed:
            raise UsageError(
                f"precision: fp8: expected a GPU of compute capability {_version(needed)} or "
                f"newer for the recipe {recipe}, found {torch.cuda.get_device_name(device)} with "
                f"{_version(found)}; take precision: bf16"
            )
    try:
        float8 = importlib.import_module("torchao.float8")
        linear = importlib.import_module("torchao.float8.float8_linear")
        multiply = linear.matmul_with_hp_or_float8_args.apply
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"precision: fp8: expected torchao 0.15 or newer, found that it cannot be loaded "
            f"({error}); pip install 'drivetrain[fp8]', or take precision: bf16"
        ) from error
    if config is None:
        config = float8.Float8LinearConfig.from_recipe_name(recipe.removesuffix("_gathered"))
        # The sum of a weight's gradient goes over all rows, whose number may be any.
        config = dataclasses.replace(config, pad_inner_dim=True)
    if device.type == "cpu":
        config = dataclasses.replace(config, emulate=True)
    with torch.device("meta"):
        layer = linear.Float8Linear(MULTIPLE, MULTIPLE, bias=False, config=config)
    usual = float8.CastConfig(target_dtype=FP8)
    casts = (config.cast_config_weight, config.cast_config_weight_for_grad_input)
    if recipe == GATHERED and (casts != (usual, usual) or config.round_scales_to_power_of_2):
        raise UsageError(
            f"dtypes.fp8: {GATHERED}: expected a config that casts weights to {FP8} with one scale "
            f"for a tensor, in both of their products, and no power of two, found {config}; take "
            "dtypes.fp8: tensorwise"
        )
    return _Fp8Products(multiply, layer.linear_mm_config, layer.config, device.type)


def _version(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


class _FrozenProduct(torch.autograd.Function):
    """A product with a frozen weight: torchao's own would compute the weight's gradient as well."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, products: "_Fp8Products") -> Tensor:
        """Return the outputs."""
        ctx.save_for_backward(weight)
        ctx.products = products
        return products.outputs(inputs, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the inputs."""
        return ctx.products.input_gradient(gradient, *ctx.saved_tensors), None, None


class _Fp8Products:
    """Stands around the forward of ``Linear`` layers: the same, with products in fp8."""

    def __init__(self, multiply: Function, operands: Any, config: Any, device_type: str) -> None:
        self._multiply = multiply
        self._operands, self._config = operands, config
        self._device_type = device_type
        # The gradient of the inputs is a product, too, with the gradient of the outputs as inputs.
        self._backward_operands = operands._replace(output=operands.grad_input)
        self._backward_config = dataclasses.replace(
            config,
            cast_config_input=config.cast_config_grad_output,
            cast_config_weight=config.cast_config_weight_for_grad_input,
            cast_config_input_for_grad_weight=None,
            cast_config_weight_for_grad_input=None,
            cast_config_grad_output_for_grad_weight=None,
        )

    def __deepcopy__(self, memo: Any) -> "_Fp8Products":
        return self

    def __call__(
        self, module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords
    ) -> Tensor:
        """Return the layer's outputs, in the dtype of autocast, or else of its inputs."""
        layer = cast(nn.Linear, module)
        (inputs,) = (*args, *kwargs.values())
        if torch.is_autocast_enabled(self._device_type):
            inputs = inputs.to(torch.get_autocast_dtype(self._device_type))
        if layer.weight.requires_grad:
            outputs = self.outputs(inputs, layer.weight)
        else:
            outputs = _FrozenProduct.apply(inputs, layer.weight, self)  # type: ignore[no-untyped-call]
        return outputs if layer.bias is None else outputs + layer.bias.to(outputs.dtype)

    def outputs(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return the outputs of a layer without its bias."""
        return cast(Tensor, self._multiply(inputs, weight.t(), self._operands, self._config))

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of a layer's inputs, from that of its outputs."""
        operands, config = self._backward_operands, self._backward_config
        return cast(Tensor, self._multiply(gradient, weight, operands, config))
