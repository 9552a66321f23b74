"""Finds the latents of a video by gradients through LTX-2's decoder.

    pip install diffusers
    python examples/fit_video.py
    python examples/fit_video.py --model FOLDER --steps 100

The decoder of LTX-2.5 attends in windows of space and time. diffusers computes them by
FlexAttention, which has no backward on a CPU, or by NATTEN on a GPU. `diffusers.use` runs them on
any device, with gradients: here Adam moves latents until the decoded video is the one that was
given. FOLDER holds a saved `LTX2VideoDiffusionDecoderModel`. Prints the distance between both ways'
videos, and the error before and after. Without --model the decoder is small and has random weights,
and the video is its own.
"""

import torch

from sparsering.cli.argument_types import positive
from sparsering.mistakes import OneLineParser, one_line_errors

with one_line_errors("fit_video", install="pip install diffusers"):
    from diffusers import LTX2VideoDiffusionDecoderModel

    from sparsering.integrations import diffusers


def made(path: str | None) -> LTX2VideoDiffusionDecoderModel:
    """Loads the decoder of a folder, or makes a small one."""
    if path is not None:
        return LTX2VideoDiffusionDecoderModel.from_pretrained(path).eval()
    return LTX2VideoDiffusionDecoderModel(
        latent_channels=8,
        patch_size=2,
        decoder_head_dim=8,
        decoder_stage_channels=(64, 32, 16, 16, 16),
        decoder_upsample_channel_reductions=(2, 2, 1, 1),
        decoder_stage_depths=(1, 1, 1, 1, 2),
        decoder_stage_kernels=((3, 3, 3),) * 4,
        decoder_upsample_strides=((1, 2, 2), (2, 1, 1), (2, 1, 1), (2, 1, 1)),
        decoder_stage5_kernel=(5, 7, 7),
        decoder_t_emb_dim=16,
    ).eval()


def decoded(model: LTX2VideoDiffusionDecoderModel, latents: torch.Tensor) -> torch.Tensor:
    """Decodes latents [B, C, F, H, W] with the same noise at every call."""
    return model.decode(latents, generator=torch.Generator().manual_seed(1)).sample


def main(model: str | None = None, steps: int = 40) -> dict[str, float]:
    """Fits latents of 9 frames; returns the figures that it prints."""
    torch.manual_seed(0)
    net = made(model).requires_grad_(False)
    hidden = torch.randn(1, net.config.latent_channels, 2, 7, 7)
    with torch.no_grad():
        before = decoded(net, hidden)
        video = decoded(diffusers.use(net), hidden)
    apart = float((video - before).abs().max() / before.abs().max())
    print(f"a video {list(video.shape)}: both ways differ by {apart:.1e} of the largest value")

    latents = torch.zeros_like(hidden).requires_grad_()
    optimizer = torch.optim.Adam([latents], 0.1)
    losses = []
    for _ in range(steps):
        loss = (decoded(net, latents) - video).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"mean squared error {losses[0]:.4f} at first, {losses[-1]:.4f} after {steps} steps")
    return {"apart": apart, "first": losses[0], "last": losses[-1]}


if __name__ == "__main__":
    with one_line_errors("fit_video"):
        parser = OneLineParser()
        parser.add_argument("--model")
        parser.add_argument("--steps", type=positive, default=40)
        main(**vars(parser.parse_args()))
