"""Triton kernels of `instance_norm`: a program works on one image and BLOCK channels of a client, or more.

The four pixels of every square of the pooling lie in four tiles [POSITIONS, BLOCK], so that the pooling is a sum of
tiles, and the norm's moments are sums over all four; two passes over registers, as exact as two over memory.
"""

import triton
import triton.language as tl


@triton.jit
def load_squares(corner, row, column, inside):
    """The four pixels of every square, whose upper left ones are at `corner`; `row` and `column` lead to the others."""
    a = tl.load(corner, inside, 0.0).to(tl.float32)
    b = tl.load(corner + column, inside, 0.0).to(tl.float32)
    c = tl.load(corner + row, inside, 0.0).to(tl.float32)
    d = tl.load(corner + row + column, inside, 0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def centred(a, b, c, d, epsilon, pixels, inside):
    """The four tiles without their mean, and 1 / √(variance + ε), for each channel."""
    mean = (tl.sum(a + b + c + d, 0) / pixels)[None, :]
    a, b, c, d = a - mean, b - mean, c - mean, d - mean
    squares = tl.where(inside, a * a + b * b + c * c + d * d, 0.0)
    return a, b, c, d, 1.0 / tl.sqrt(tl.sum(squares, 0) / pixels + epsilon)


@triton.jit
def pool_normed(a, b, c, d, gamma, beta, epsilon, pixels, inside):
    """The mean over the four tiles of relu(gamma · (x − mean) / √(variance + ε) + beta)."""
    a, b, c, d, scale = centred(a, b, c, d, epsilon, pixels, inside)
    scale, shift = (gamma * scale)[None, :], beta[None, :]
    a, b = tl.maximum(a * scale + shift, 0.0), tl.maximum(b * scale + shift, 0.0)
    c, d = tl.maximum(c * scale + shift, 0.0), tl.maximum(d * scale + shift, 0.0)
    return 0.25 * (a + b + c + d)


@triton.jit
def norm_relu_pool(
    x, gammas, betas, out, images, channels, rows, columns,
    x_client, x_image, x_channel, x_row, x_column,
    out_client, out_image, out_channel, out_row, out_column,
    epsilon, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`rows` and `columns` are those of the pooled image."""
    client, image = (tl.program_id(0) // images).to(tl.int64), (tl.program_id(0) % images).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.arange(0, POSITIONS)
    row, column = position // columns, position % columns
    inside = (position < rows * columns)[:, None] & (channel < channels)[None, :]
    corner = x + client * x_client + image * x_image + (channel * x_channel)[None, :]
    corner += (2 * row * x_row + 2 * column * x_column)[:, None]
    a, b, c, d = load_squares(corner, x_row, x_column, inside)
    gamma = tl.load(gammas + client * channels + channel, channel < channels, 0.0).to(tl.float32)
    beta = tl.load(betas + client * channels + channel, channel < channels, 0.0).to(tl.float32)
    pooled = pool_normed(a, b, c, d, gamma, beta, epsilon, 4 * rows * columns, inside)
    place = out + client * out_client + image * out_image + (channel * out_channel)[None, :]
    place += (row * out_row + column * out_column)[:, None]
    tl.store(place, pooled.to(out.dtype.element_ty), inside)


@triton.jit
def norm_relu_pool_backward(
    x, gammas, betas, grad, to_x, to_gammas, to_betas, images, channels, rows, columns,
    x_client, x_image, x_channel, x_row, x_column,
    grad_client, grad_image, grad_channel, grad_row, grad_column,
    to_client, to_image, to_channel, to_row, to_column,
    epsilon, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What enters is read again and normalised again: cheaper than to keep it.

    With x̂ the normalised values and g what arrives behind the ReLU: ∂x = gamma / σ · (g − mean g − x̂ · mean(g x̂)), and
    for each image ∂beta = Σ g, ∂gamma = Σ g x̂, which are [clients, images, channels] in `to_betas` and `to_gammas`.
    """
    client, image = (tl.program_id(0) // images).to(tl.int64), (tl.program_id(0) % images).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.arange(0, POSITIONS)
    row, column = position // columns, position % columns
    known = channel < channels
    inside = (position < rows * columns)[:, None] & known[None, :]
    corner = x + client * x_client + image * x_image + (channel * x_channel)[None, :]
    corner += (2 * row * x_row + 2 * column * x_column)[:, None]
    a, b, c, d = load_squares(corner, x_row, x_column, inside)
    pixels = 4 * rows * columns
    a, b, c, d, scale = centred(a, b, c, d, epsilon, pixels, inside)
    a, b, c, d = a * scale[None, :], b * scale[None, :], c * scale[None, :], d * scale[None, :]
    gamma = tl.load(gammas + client * channels + channel, known, 0.0).to(tl.float32)
    beta = tl.load(betas + client * channels + channel, known, 0.0).to(tl.float32)
    arrived = grad + client * grad_client + image * grad_image + (channel * grad_channel)[None, :]
    arrived += (row * grad_row + column * grad_column)[:, None]
    share = 0.25 * tl.load(arrived, inside, 0.0).to(tl.float32)
    to_a = tl.where(a * gamma[None, :] + beta[None, :] > 0, share, 0.0)
    to_b = tl.where(b * gamma[None, :] + beta[None, :] > 0, share, 0.0)
    to_c = tl.where(c * gamma[None, :] + beta[None, :] > 0, share, 0.0)
    to_d = tl.where(d * gamma[None, :] + beta[None, :] > 0, share, 0.0)
    to_beta = tl.sum(to_a + to_b + to_c + to_d, 0)
    to_gamma = tl.sum(to_a * a + to_b * b + to_c * c + to_d * d, 0)
    each = (client * images + image) * channels + channel
    tl.store(to_betas + each, to_beta, known)
    tl.store(to_gammas + each, to_gamma, known)
    factor, level, slope = (gamma * scale)[None, :], (to_beta / pixels)[None, :], (to_gamma / pixels)[None, :]
    place = to_x + client * to_client + image * to_image + (channel * to_channel)[None, :]
    place += (2 * row * to_row + 2 * column * to_column)[:, None]
    tl.store(place, (factor * (to_a - level - a * slope)).to(to_x.dtype.element_ty), inside)
    tl.store(place + to_column, (factor * (to_b - level - b * slope)).to(to_x.dtype.element_ty), inside)
    tl.store(place + to_row, (factor * (to_c - level - c * slope)).to(to_x.dtype.element_ty), inside)
    tl.store(place + to_row + to_column, (factor * (to_d - level - d * slope)).to(to_x.dtype.element_ty), inside)


@triton.jit
def convolved(patches, inside, weight, LOADED: tl.constexpr, PRECISION: tl.constexpr):
    """The product of patches with weights; those that are not yet there are loaded, and gone afterwards."""
    if not LOADED:
        patches = tl.load(patches, inside, 0.0)
    return tl.dot(patches, weight, input_precision=PRECISION)


@triton.jit
def conv_norm_relu_pool(
    x, weights, gammas, betas, out, images, inputs, height, width, channels, rows, columns,
    x_client, x_image, x_channel, x_row, x_column,
    out_client, out_image, out_channel, out_row, out_column,
    epsilon, SIDE: tl.constexpr, PADDING: tl.constexpr, PATCH: tl.constexpr, PRECISION: tl.constexpr,
    POSITIONS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The same behind a convolution of stride 1 whose patches have at most PATCH numbers: its output is never written.

    `weights` [clients, channels, inputs · SIDE²]; a bias would be subtracted again by the norm. A program of
    several BLOCKS of channels keeps the patches, so that they are gathered once; one of a single block holds a quarter
    of them at a time.
    """
    client, image = (tl.program_id(0) // images).to(tl.int64), (tl.program_id(0) % images).to(tl.int64)
    position = tl.arange(0, POSITIONS)
    row, column = position // columns, position % columns
    number = tl.arange(0, PATCH)
    size = inputs * SIDE * SIDE
    source, below, right = number // (SIDE * SIDE), number // SIDE % SIDE, number % SIDE
    # one pixel up and to the left of the first patch that the pooling needs, seen from every number of a patch
    top = 2 * row[:, None] + below[None, :] - PADDING
    left = 2 * column[:, None] + right[None, :] - PADDING
    known = (position < rows * columns)[:, None] & (number < size)[None, :]
    start = x + client * x_client + image * x_image + (source * x_channel)[None, :] + top * x_row + left * x_column
    up, down = known & (top >= 0) & (top < height), known & (top >= -1) & (top < height - 1)
    near, far = (left >= 0) & (left < width), (left >= -1) & (left < width - 1)
    patches_a, patches_b, patches_c, patches_d = start, start + x_column, start + x_row, start + x_row + x_column
    in_a, in_b, in_c, in_d = up & near, up & far, down & near, down & far
    if BLOCKS > 1:
        patches_a, patches_b = tl.load(patches_a, in_a, 0.0), tl.load(patches_b, in_b, 0.0)
        patches_c, patches_d = tl.load(patches_c, in_c, 0.0), tl.load(patches_d, in_d, 0.0)
    for block in range(BLOCKS):
        channel = (tl.program_id(1) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        inside = (position < rows * columns)[:, None] & (channel < channels)[None, :]
        weight = weights + client * channels * size + (channel * size)[None, :] + number[:, None]
        weight = tl.load(weight, (number < size)[:, None] & (channel < channels)[None, :], 0.0)
        a = convolved(patches_a, in_a, weight, BLOCKS > 1, PRECISION)
        b = convolved(patches_b, in_b, weight, BLOCKS > 1, PRECISION)
        c = convolved(patches_c, in_c, weight, BLOCKS > 1, PRECISION)
        d = convolved(patches_d, in_d, weight, BLOCKS > 1, PRECISION)
        gamma = tl.load(gammas + client * channels + channel, channel < channels, 0.0).to(tl.float32)
        beta = tl.load(betas + client * channels + channel, channel < channels, 0.0).to(tl.float32)
        pooled = pool_normed(a, b, c, d, gamma, beta, epsilon, 4 * rows * columns, inside)
        place = out + client * out_client + image * out_image + (channel * out_channel)[None, :]
        place += (row * out_row + column * out_column)[:, None]
        tl.store(place, pooled.to(out.dtype.element_ty), inside)
