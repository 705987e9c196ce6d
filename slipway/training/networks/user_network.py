"""The user's own network, `train.network: package.module:Class`, and its contract.

The class, or a function that returns a module, is called with the keywords `input_shape`,
`num_outputs` and `train.network_arguments`. The module maps (rows, *input_shape) float32 to
(rows, num_outputs): logits of classes, or one value in standard deviations from the mean target.
"""

import torch
from torch import Tensor, nn

from slipway.system.errors import ParamsError, UnavailableError
from slipway.system.user_code import definition_place, failure, import_named
from slipway.training.networks.networks import NetworkSpec


def user_backbone(spec: NetworkSpec, input_shape: tuple[int, ...]) -> nn.Module:
    """Build the user's module, and check the shape and dtype of its output for one row of zeros.

    Raises UnavailableError if the module cannot be imported, ParamsError if it breaks the contract.
    """
    make, name = import_named(spec.name), f"train.network {spec.name!r}"
    if not callable(make):
        raise UnavailableError(
            f"{name} is {type(make).__name__}, expected a class of torch.nn.Module or a function "
            "that returns one. Correct the name."
        )
    try:
        module = make(input_shape=input_shape, num_outputs=spec.num_outputs, **spec.arguments)
    except Exception as error:
        keywords = ", ".join(["input_shape", "num_outputs", *spec.arguments])
        raise ParamsError(
            f"{name} cannot be built: {failure(error, make)}. It is called with the keywords "
            f"{keywords}; all but the first two are train.network_arguments. Correct one of these."
        ) from error
    if not isinstance(module, nn.Module):
        raise ParamsError(
            f"{name} made {type(module).__name__} ({definition_place(make)}), expected a "
            "torch.nn.Module. Return one."
        )
    _check_outputs(spec, module, name, input_shape)
    return module


def _check_outputs(
    spec: NetworkSpec, module: nn.Module, name: str, input_shape: tuple[int, ...]
) -> None:
    expected = (1, spec.num_outputs)
    takes = f"It gets float32 of shape {(1, *input_shape)} and returns float32 of {expected}"
    try:
        with torch.no_grad():
            outputs = module.eval()(torch.zeros(1, *input_shape))
    except Exception as error:
        raise ParamsError(
            f"{name} fails: {failure(error, type(module))}. {takes}. Correct its forward(), "
            "or train.network_arguments."
        ) from error
    finally:
        module.train()
    if isinstance(outputs, Tensor) and outputs.is_floating_point() and outputs.shape == expected:
        return
    found = type(outputs).__name__
    if isinstance(outputs, Tensor):
        found = f"{outputs.dtype} of shape {tuple(outputs.shape)}"
    raise ParamsError(
        f"{name} returned {found} ({definition_place(type(module))}). {takes}. "
        "Correct its forward()."
    )
