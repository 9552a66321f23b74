"""Calls for shapes alone: tensors on the meta device, or of torch's FakeTensorMode.

Such tensors hold no values, so no condition on them can be evaluated. The caller says what to
assume instead: no padding and a single document, because neither changes a shape.
"""

from torch import Tensor

from ....ground.arguments import is_shape_alone


def is_true(condition: Tensor, unknown: bool) -> bool:
    """Returns a one-element condition as bool; `unknown` if the tensor has no values."""
    return unknown if is_shape_alone(condition) else bool(condition)
