"""Forecasts thousands of series in groups with Chronos-2, at the cost of the groups.

    pip install chronos-forecasting
    python examples/forecast_groups.py
    python examples/forecast_groups.py --model amazon/chronos-2 --series 4096

Chronos-2 lets the series of a group see each other, by a mask of all pairs of series at each time.
`hf.convert` computes the pairs of a group alone: memory grows with the series, not with their
square. Prints the seconds of a forecast before and after, and the distance of the forecasts.
Without --model it has small random weights.
"""

import time

import torch

from sparsering.cli.argument_types import positive
from sparsering.mistakes import OneLineParser, one_line_errors

with one_line_errors("forecast_groups", install="pip install chronos-forecasting"):
    from chronos.chronos2 import Chronos2Model
    from chronos.chronos2.config import Chronos2CoreConfig

    from sparsering.integrations import transformers as hf


def made(path: str | None) -> Chronos2Model:
    """Loads the model, or makes a small one."""
    if path is not None:
        return Chronos2Model.from_pretrained(path).eval()
    core = Chronos2CoreConfig(d_model=128, d_kv=32, d_ff=256, num_heads=4, num_layers=2)
    core.chronos_config = {
        **{"context_length": 256, "input_patch_size": 16, "input_patch_stride": 16},
        **{"output_patch_size": 16, "quantiles": [0.1, 0.5, 0.9], "use_reg_token": True},
        **{"use_arcsinh": True, "max_output_patches": 4, "time_encoding_scale": 256},
    }
    return Chronos2Model(core).eval()


@torch.no_grad()
def main(model: str | None = None, series: int = 2000) -> dict[str, float]:
    """Forecasts 32 values of each series; returns the figures that it prints."""
    torch.manual_seed(0)
    net = made(model)
    context = torch.randn(series, 256).cumsum(1)
    sizes = torch.randint(1, 9, (series,))  # a target and its covariates, for example
    groups = torch.arange(series).repeat_interleave(sizes)[:series]
    seconds, forecasts = [], []
    for converts in (False, True):
        if converts:
            hf.convert(net)
        begin = time.perf_counter()
        out = net(context=context, group_ids=groups, num_output_patches=2).quantile_preds
        seconds.append(time.perf_counter() - begin)
        forecasts.append(out)
    scale = forecasts[0].abs().max()
    distance = float((forecasts[1] - forecasts[0]).abs().max() / scale)
    print(
        f"{series:,} series in {int(groups[-1]) + 1:,} groups, [series, quantiles, values] ", end=""
    )
    print(f"{list(out.shape)}: {seconds[0]:.2f} s before hf.convert, {seconds[1]:.2f} s after")
    print(f"forecasts differ by {distance:.1e}, relative to the largest")
    return {"before": seconds[0], "after": seconds[1], "distance": distance}


if __name__ == "__main__":
    with one_line_errors("forecast_groups"):
        parser = OneLineParser()
        parser.add_argument("--model")
        parser.add_argument("--series", type=positive, default=2000)
        main(**vars(parser.parse_args()))
