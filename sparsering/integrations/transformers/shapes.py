"""Calls for shapes alone: tensors on the meta device, or of torch's FakeTensorMode.

They have no numbers, so a question to them has no answer. The caller says which one it goes on
with: such a call has no padding and a single document, because neither changes a shape.
"""

import sys

from torch import Tensor
from torch._C import _get_tracing_state
from torch._subclasses.fake_tensor import FakeTensor


def is_shape_alone(x: object) -> bool:
    """Whether a tensor has a shape and no numbers, and no tracer records what is done with it.

    A graph that a tracer records gets numbers later: there a question must raise as ever.
    """
    if not isinstance(x, FakeTensor) and not (isinstance(x, Tensor) and x.is_meta):
        return False
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")  # slow to import
    traced = proxies is not None and proxies.get_proxy_mode() is not None
    return not traced and _get_tracing_state() is None


def is_true(condition: Tensor, unknown: bool) -> bool:
    """Returns the bool of a tensor with one element; `unknown` if it has a shape alone."""
    return unknown if is_shape_alone(condition) else bool(condition)
