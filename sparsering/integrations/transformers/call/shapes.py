"""Calls for shapes alone: tensors on the meta device, or of torch's FakeTensorMode.

They have no numbers, so a question to them has no answer. The caller says which one it goes on
with: such a call has no padding and a single document, because neither changes a shape.
"""

from torch import Tensor

from ....ground.arguments import is_shape_alone


def is_true(condition: Tensor, unknown: bool) -> bool:
    """Returns the bool of a tensor with one element; `unknown` if it has a shape alone."""
    return unknown if is_shape_alone(condition) else bool(condition)
