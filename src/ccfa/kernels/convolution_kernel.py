"""3x3 convolutions of narrow maps as Triton kernels; `Conv3x3` and `normalised` decide when they are used.

cuDNN's kernels are made for wide maps. With 16 to 64 channels most of their time is not arithmetic. These kernels read
the float32 weights directly, so that no copy in 16 bits is made, and return the weights' gradient in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

RESULTS = 4096  # of a tile of `_convolve`: pixels times channels
PIXELS = 64  # of a tile of `_correlate`
GRADIENTS = 2816  # parts times channels in `weight_gradients`: enough for a large GPU, few enough to sum quickly


@custom_op("ccfa::conv3x3", mutates_args=())
def conv3x3(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The convolution of (B, C, H, W) with (out, C, 3, 3), padded by 1, in the precision of `x`."""
    result = _output(x, weight, stride)
    _launch(x, weight, result, stride)
    return result


@conv3x3.register_fake
def _output(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    height, width = (-(-side // stride) for side in x.shape[2:])
    shape = (len(x), len(weight), height, width)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@custom_op("ccfa::conv3x3_with_sums", mutates_args=())
def conv3x3_with_sums(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """The convolution, and of parts of its pixels each channel's sum and sum of squares, (parts, 2, out)."""
    result, sums = _output_with_sums(x, weight, stride)
    _launch(x, weight, result, stride, sums=sums)
    return result, sums


@conv3x3_with_sums.register_fake
def _output_with_sums(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    result = _output(x, weight, stride)
    num, out, height, width = result.shape
    num_parts = triton.cdiv(num * height * width, _tile_pixels(out))
    return result, torch.empty(num_parts, 2, out, dtype=torch.float32, device=x.device)


@custom_op("ccfa::conv3x3_input_gradient", mutates_args=())
def input_gradient(gradient: Tensor, weight: Tensor, height: int, width: int, stride: int) -> Tensor:
    """The gradient with respect to the convolution's input, from that of its output."""
    result = _input(gradient, weight, height, width, stride)
    _launch(gradient, weight, result, stride, to_input=True)
    return result


@input_gradient.register_fake
def _input(gradient: Tensor, weight: Tensor, height: int, width: int, stride: int) -> Tensor:
    shape = (len(gradient), weight.shape[1], height, width)
    return torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)


def _tile_pixels(out: int) -> int:
    return RESULTS // triton.next_power_of_2(out)


def _launch(
    source: Tensor, weight: Tensor, target: Tensor, stride: int, to_input: bool = False, sums: Tensor | None = None
) -> None:
    num, channels, *sides = source.shape
    out = target.shape[1]
    pixels = _tile_pixels(out)
    _convolve[(triton.cdiv(target.numel() // out, pixels),)](
        source.contiguous(memory_format=torch.channels_last),
        weight.contiguous(memory_format=torch.channels_last),
        target,
        target if sums is None else sums,
        num,
        *(*sides, *target.shape[2:], channels, out, stride),
        TO_INPUT=to_input,
        SUMS=sums is not None,
        PIXELS=pixels,
        FROM_BLOCK=max(16, triton.next_power_of_2(channels)),
        num_warps=4,
    )


@custom_op("ccfa::conv3x3_weight_gradients", mutates_args=())
def weight_gradients(x: Tensor, gradient: Tensor, stride: int) -> Tensor:
    """The gradient with respect to the weights as parts to be summed, (parts, out, 3, 3, C) in float32."""
    parts = _parts(x, gradient, stride)
    channels, out = x.shape[1], gradient.shape[1]
    num_pixels = gradient.numel() // out
    kernel_rows = 3 if channels < 16 else 1  # a row of few channels would leave most of a tile empty
    _correlate[(len(parts), 3 // kernel_rows)](
        x.contiguous(memory_format=torch.channels_last),
        gradient.contiguous(memory_format=torch.channels_last),
        parts,
        num_pixels,
        triton.cdiv(num_pixels, len(parts)),
        *(*x.shape[2:], *gradient.shape[2:], channels, out, stride),
        PIXELS=PIXELS,
        KERNEL_ROWS=kernel_rows,
        ENTRIES=max(16, triton.next_power_of_2(3 * kernel_rows * channels)),
        num_warps=4,
    )
    return parts


@weight_gradients.register_fake
def _parts(x: Tensor, gradient: Tensor, stride: int) -> Tensor:
    num, out, height, width = gradient.shape
    num_parts = min(GRADIENTS // out, triton.cdiv(num * height * width, PIXELS))
    return torch.empty(num_parts, out, 3, 3, x.shape[1], dtype=torch.float32, device=x.device)


def _remember(ctx, inputs, output):
    x, weight, ctx.stride = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, gradient, *_of_sums):
    x, weight = ctx.saved_tensors
    of_input = input_gradient(gradient, weight, *x.shape[2:], ctx.stride) if ctx.needs_input_grad[0] else None
    of_weight = weight_gradients(x, gradient, ctx.stride).sum(0).permute(0, 3, 1, 2)
    return of_input, of_weight, None


conv3x3.register_autograd(_backward, setup_context=_remember)
# The sums get no gradient here: `Normalise` computes it with that of the batch norm.
conv3x3_with_sums.register_autograd(_backward, setup_context=_remember)


@triton.jit
def _convolve(
    source, weights, target, sums, num,
    FROM_HEIGHT: tl.constexpr, FROM_WIDTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    FROM: tl.constexpr, TO: tl.constexpr, STRIDE: tl.constexpr, TO_INPUT: tl.constexpr, SUMS: tl.constexpr,
    PIXELS: tl.constexpr, FROM_BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of pixels with all their channels; with TO_INPUT from the output's gradient to the input's."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    column, row, image = pixel % WIDTH, pixel // WIDTH % HEIGHT, pixel // (WIDTH * HEIGHT)
    channel, out = tl.arange(0, FROM_BLOCK), tl.arange(0, TO)
    total = tl.zeros([PIXELS, TO], tl.float32)
    for tap in tl.static_range(9):
        if TO_INPUT:  # the outputs that read this pixel through this tap
            from_row, from_column = row + 1 - tap // 3, column + 1 - tap % 3
            inside = (from_row >= 0) & (from_column >= 0) & (from_row % STRIDE == 0) & (from_column % STRIDE == 0)
            from_row, from_column = from_row // STRIDE, from_column // STRIDE
            places = channel[:, None] * (9 * TO) + tap * TO + out[None, :]
        else:
            from_row, from_column = row * STRIDE + tap // 3 - 1, column * STRIDE + tap % 3 - 1
            inside = (from_row >= 0) & (from_column >= 0)
            places = channel[:, None] + tap * FROM + out[None, :] * (9 * FROM)
        inside &= (from_row < FROM_HEIGHT) & (from_column < FROM_WIDTH) & (image < num)
        start = ((image * FROM_HEIGHT + from_row) * FROM_WIDTH + from_column) * FROM
        real = channel < FROM
        tile = tl.load(source + start[:, None] + channel[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        weight = tl.load(weights + places, mask=real[:, None], other=0.0)
        total = tl.dot(tile, weight.to(tile.dtype), total)
    places = pixel[:, None] * TO + out[None, :]
    tl.store(target + places, total.to(target.dtype.element_ty), mask=(image < num)[:, None])
    if SUMS:
        places = sums + tl.program_id(0) * (2 * TO) + out
        tl.store(places, tl.sum(total, axis=0))
        tl.store(places + TO, tl.sum(total * total, axis=0))


@triton.jit
def _correlate(
    source, gradient, parts, num_pixels, pixels_each,
    FROM_HEIGHT: tl.constexpr, FROM_WIDTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    FROM: tl.constexpr, TO: tl.constexpr, STRIDE: tl.constexpr, PIXELS: tl.constexpr, KERNEL_ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Some rows of the kernel's weights: what a part of the pixels adds to their gradient."""
    part, first_tap = tl.program_id(0), tl.program_id(1) * KERNEL_ROWS * 3
    entry = tl.arange(0, ENTRIES)
    tap, channel = first_tap + entry // FROM, entry % FROM
    real = entry < KERNEL_ROWS * 3 * FROM
    out = tl.arange(0, TO)
    total = tl.zeros([TO, ENTRIES], tl.float32)
    end = tl.minimum((part + 1) * pixels_each, num_pixels)
    for first in range(part * pixels_each, end, PIXELS):
        pixel = first + tl.arange(0, PIXELS)
        present = pixel < end
        row = (pixel // WIDTH % HEIGHT * STRIDE - 1)[:, None] + (tap // 3)[None, :]
        column = (pixel % WIDTH * STRIDE - 1)[:, None] + (tap % 3)[None, :]
        line = (pixel // (WIDTH * HEIGHT) * FROM_HEIGHT)[:, None] + row
        inside = (row >= 0) & (row < FROM_HEIGHT) & (column >= 0) & (column < FROM_WIDTH)
        inside &= present[:, None] & real[None, :]
        seen = tl.load(source + (line * FROM_WIDTH + column) * FROM + channel[None, :], mask=inside, other=0.0)
        given = tl.load(gradient + pixel[:, None] * TO + out[None, :], mask=present[:, None], other=0.0)
        total = tl.dot(tl.trans(given), seen, total)
    places = ((part * TO + out[:, None]) * 9 + tap[None, :]) * FROM + channel[None, :]
    tl.store(parts + places, total, mask=real[None, :])
