"""DiNAT: windows over the tokens of an image, dilated in every other layer, with learnt biases.

Its code calls NATTEN's functions `natten2dqkrpb` and `natten2dav`, which NATTEN 0.20 removed, and
refuses to make a model without NATTEN.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers.utils
from torch import Tensor, nn
from transformers.utils import import_utils

from ....coordinates import relative_bias_2d
from ....functional import attention
from ....ground.keywords import with_hints
from ....patterns.neighbourhood import Neighbourhood
from .wrapped import Converted, refuse_weights


class ImageWindowAttention(nn.Module):
    """Attention of DiNAT: a dilated window around each token of an image, with a bias by place."""

    def forward(
        self: Any,  # the attributes are those of the original class
        hidden_states: Tensor,
        output_attentions: bool = False,
    ) -> tuple[Tensor]:
        """Attends; hidden_states [B, rows, columns, E]."""
        if output_attentions:
            refuse_weights()
        rows, columns = hidden_states.shape[1:3]
        window, dilation = self.kernel_size, self.dilation
        query, key, value = (
            layer(hidden_states)
            .flatten(1, 2)
            .unflatten(-1, (self.num_attention_heads, -1))
            .transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        bias: dict[str, Any]
        # A window of dilation 2 or more has fewer columns than half of the grid, on either side.
        if dilation > 1 or columns > 2 * (window - 1):
            bias = {"distance_bias": relative_bias_2d(self.rpb, (rows, columns), dilation=dilation)}
        else:
            bias = {"score_mod": _bias_by_place(self.rpb, columns, dilation)}
        pattern = Neighbourhood((rows, columns), window=window, dilation=dilation)
        dropout = self.dropout.p if self.training else 0.0
        out = attention(query, key, value, pattern, dropout_p=dropout, **bias)
        return (out.transpose(1, 2).reshape(hidden_states.shape),)


def _bias_by_place(table: Tensor, columns: int, dilation: int) -> Callable[..., Tensor]:
    """Returns a score_mod that adds the table of a grid too narrow for `relative_bias_2d`."""
    most = table.shape[1] // 2  # rows, and columns, between a query and a key of its window

    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        down = (key // columns - query // columns) // dilation
        right = (key % columns - query % columns) // dilation
        down, right = (x.clamp(-most, most) + most for x in (down, right))
        return score + table[head, down, right]

    return add


@with_hints()
@contextmanager
def without_natten() -> Iterator[None]:
    """Lets transformers make a model that asks for NATTEN, in a `with` block, without NATTEN.

    `convert` then gives the model attention that needs no NATTEN. Inside the block transformers'
    check for the package passes; afterwards all is as before. Blocks of several threads must not
    overlap.

    Returns: a context manager.

    Example:
        >>> with without_natten():
        ...     model = AutoModel.from_pretrained("shi-labs/dinat-mini-in1k-224")
        >>> convert(model)
    """
    found = transformers.utils.is_natten_available
    transformers.utils.is_natten_available = lambda: False  # a NATTEN since 0.20 breaks the import
    try:
        from transformers.models.dinat import modeling_dinat  # noqa: F401
    finally:
        transformers.utils.is_natten_available = found
    checks = import_utils.BACKENDS_MAPPING
    check = checks["natten"]
    checks["natten"] = (lambda: True, check[1])
    try:
        yield
    finally:
        checks["natten"] = check


CONVERTED: dict[str, Converted] = {
    "NeighborhoodAttention": Converted("DiNAT", ImageWindowAttention),
}
"""By the name of a class of transformers."""
