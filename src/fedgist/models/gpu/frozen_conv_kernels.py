"""Triton kernels of `frozen_conv`: a program works on POSITIONS squares of the pooling, or pixels, of a client.

Every thread keeps all channels of its squares, so that a number that it reads meets every weight of a channel at once.
The channels are too few for the matrix units; these are plain float32 products, exact whatever TF32 is set to.
"""

import triton
import triton.language as tl


@triton.jit
def place_of(position, columns, rows, images, NOWHERE: tl.constexpr):
    """Image, row and column of each position; those behind the last image get a row that lies outside of all."""
    image, row, column = position // (rows * columns), position // columns % rows, position % columns
    return image.to(tl.int64), tl.where(image < images, row, NOWHERE), column


@triton.jit
def within(at, size):
    return (at >= 0) & (at < size)


@triton.jit
def squares(
    x, weights, inputs, height, width, row, column, x_channel, x_row, x_column,
    SIDE: tl.constexpr, PADDING: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a convolution makes of the image at `x` in the four pixels of every square, as tiles [BLOCK, POSITIONS].

    A line of a patch is written out in the code, no more: whole patches would be hardly faster, and long to compile.
    """
    top, left = 2 * row - PADDING, 2 * column - PADDING
    x += top * x_row + left * x_column
    weights += tl.arange(0, BLOCK)[:, None]
    a = tl.zeros((BLOCK, POSITIONS), tl.float32)
    b, c, d = a, a, a
    for line in range(inputs * SIDE):
        source, i = line // SIDE, line % SIDE
        start = x + source * x_channel + i * x_row
        upper, lower = within(top + i, height), within(top + i + 1, height)
        for j in tl.static_range(SIDE):
            weight = tl.load(weights + (line * SIDE + j) * BLOCK)
            near, far = within(left + j, width), within(left + j + 1, width)
            corner = start + j * x_column
            a += tl.load(corner, upper & near, 0.0) * weight
            b += tl.load(corner + x_column, upper & far, 0.0) * weight
            c += tl.load(corner + x_row, lower & near, 0.0) * weight
            d += tl.load(corner + x_row + x_column, lower & far, 0.0) * weight
    return a, b, c, d


@triton.jit
def load_norm(biases, gammas, betas, running_means, running_variances, each, known, epsilon):
    """Three numbers a channel: conv(x) + shift is y − running mean, and scale times this plus beta what the norm makes.

    That difference is also what the statistics are taken of: where the mean is near the running one, its square has
    nothing that would have to be subtracted from the mean of squares again.
    """
    shift = tl.load(biases + each, known, 0.0) - tl.load(running_means + each, known, 0.0)
    scale = tl.load(gammas + each, known, 0.0) / tl.sqrt(tl.load(running_variances + each, known, 1.0) + epsilon)
    return shift, scale, tl.load(betas + each, known, 0.0)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(a, b, c, d):
    return larger(larger(a, b), larger(c, d))


@triton.jit
def to_squares(a, b, c, d, arrived):
    """The gradients of a square's four pixels, where `arrived` is that of its largest behind a ReLU.

    It goes to the first of the largest, as torch has it.
    """
    best = largest(a, b, c, d)
    left = tl.where(best > 0, arrived, 0.0)
    to_a = tl.where(a == best, left, 0.0)
    left -= to_a  # the first takes all of it
    to_b = tl.where(b == best, left, 0.0)
    left -= to_b
    to_c = tl.where(c == best, left, 0.0)
    return to_a, to_b, to_c, left - to_c


@triton.jit
def forward(
    x, weights, biases, gammas, betas, running_means, running_variances, pooled, shares,
    images, inputs, height, width, channels, rows, columns,
    x_client, x_image, x_channel, x_row, x_column, epsilon,
    SIDE: tl.constexpr, PADDING: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`rows` and `columns` are those of the pooled image. `weights` [clients, inputs, SIDE, SIDE, BLOCK], with zeros
    where there is no channel.

    `shares` [clients, programs, 2, channels] are each program's in the means of y − running mean and of its square.
    """
    client = tl.program_id(1).to(tl.int64)
    position = (tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS))[None, :]
    image, row, column = place_of(position, columns, rows, images, -SIDE)
    inside = image < images
    a, b, c, d = squares(
        x + client * x_client + image * x_image, weights + client * inputs * SIDE * SIDE * BLOCK, inputs, height, width,
        row, column, x_channel, x_row, x_column, SIDE, PADDING, POSITIONS, BLOCK,
    )  # fmt: skip
    channel = tl.arange(0, BLOCK)[:, None]
    known, each = channel < channels, client * channels + channel
    shift, scale, beta = load_norm(biases, gammas, betas, running_means, running_variances, each, known, epsilon)
    a, b, c, d = a + shift, b + shift, c + shift, d + shift
    total = tl.sum(tl.where(inside, a + b + c + d, 0.0), 1)[:, None]
    squared = tl.sum(tl.where(inside, a * a + b * b + c * c + d * d, 0.0), 1)[:, None]
    values = 4 * images * rows * columns
    own = shares + (client * tl.num_programs(0) + tl.program_id(0)) * 2 * channels + channel
    tl.store(own, total / values, known)
    tl.store(own + channels, squared / values, known)
    best = largest(a * scale + beta, b * scale + beta, c * scale + beta, d * scale + beta)
    place = ((client * images + image) * channels + channel) * rows * columns + row * columns + column
    tl.store(pooled + place, larger(best, 0.0), inside & known)


@triton.jit
def backward_to_y(
    x, weights, biases, gammas, betas, running_means, running_variances, means, to_pooled, to_means, to_variances, to_y,
    images, inputs, height, width, channels, rows, columns,
    x_client, x_image, x_channel, x_row, x_column, epsilon,
    SIDE: tl.constexpr, PADDING: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of y, the convolution's output, which is computed again: cheaper than to keep it."""
    client = tl.program_id(1).to(tl.int64)
    position = (tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS))[None, :]
    image, row, column = place_of(position, columns, rows, images, -SIDE)
    a, b, c, d = squares(
        x + client * x_client + image * x_image, weights + client * inputs * SIDE * SIDE * BLOCK, inputs, height, width,
        row, column, x_channel, x_row, x_column, SIDE, PADDING, POSITIONS, BLOCK,
    )  # fmt: skip
    channel = tl.arange(0, BLOCK)[:, None]
    known, each = channel < channels, client * channels + channel
    shift, scale, beta = load_norm(biases, gammas, betas, running_means, running_variances, each, known, epsilon)
    a, b, c, d = a + shift, b + shift, c + shift, d + shift
    values = 4 * images * rows * columns
    level, slope = tl.load(to_means + each, known, 0.0) / values, 2 * tl.load(to_variances + each, known, 0.0) / values
    level += slope * (tl.load(running_means + each, known, 0.0) - tl.load(means + each, known, 0.0))
    normed_a, normed_b, normed_c, normed_d = a * scale + beta, b * scale + beta, c * scale + beta, d * scale + beta
    inside = (image < images) & known
    plane = (client * images + image) * channels + channel
    arrived = tl.load(to_pooled + plane * rows * columns + row * columns + column, inside, 0.0)
    to_a, to_b, to_c, to_d = to_squares(normed_a, normed_b, normed_c, normed_d, arrived * scale)
    place = to_y + plane * 4 * rows * columns + 4 * row * columns + 2 * column
    tl.store(place, to_a + level + slope * a, inside)
    tl.store(place + 1, to_b + level + slope * b, inside)
    tl.store(place + 2 * columns, to_c + level + slope * c, inside)
    tl.store(place + 2 * columns + 1, to_d + level + slope * d, inside)


@triton.jit
def backward_to_x(
    to_y, weights, to_x, images, channels, y_height, y_width, inputs, height, width,
    SIDE: tl.constexpr, PADDING: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Convolves the gradient of y back: W[i, j] has taken pixel (r, s) of x to (r + PADDING − i, s + PADDING − j) of y.

    `weights` [clients, channels, SIDE, SIDE, BLOCK], with zeros where there is no input. GROUP divides the channels: so
    many are read at a place that is known to be inside.
    """
    client = tl.program_id(1).to(tl.int64)
    position = (tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS))[None, :]
    image, row, column = place_of(position, width, height, images, -PADDING - 1)
    top, left = row + PADDING, column + PADDING
    to_y += (client * images + image) * channels * y_height * y_width + top * y_width + left
    source = tl.arange(0, BLOCK)[:, None]
    weights += client * channels * SIDE * SIDE * BLOCK + source
    total = tl.zeros((BLOCK, POSITIONS), tl.float32)
    for line in range(channels // GROUP * SIDE):
        first, i = line // SIDE * GROUP, line % SIDE
        line_inside = within(top - i, y_height)
        for j in tl.static_range(SIDE):
            inside = line_inside & within(left - j, y_width)
            for k in tl.static_range(GROUP):
                number = tl.load(to_y + ((first + k) * y_height - i) * y_width - j, inside, 0.0)
                total += number * tl.load(weights + (((first + k) * SIDE + i) * SIDE + j) * BLOCK)
    place = ((client * images + image) * inputs + source) * height * width + row * width + column
    tl.store(to_x + place, total, (image < images) & (source < inputs))
