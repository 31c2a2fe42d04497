"""Arithmetic that the kernels share, with the detours that bfloat16 needs in the interpreter."""

# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
import math

import triton
import triton.language as tl

# Finite, so that a row that sees no key of an item gets weight 0 and not NaN.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
# Probabilities in float16 are multiplied by 2 to this power, so that those of very many keys with little weight each do
# not vanish.
HALF_SHIFT: tl.constexpr = tl.constexpr(15.0)
# The room above the shift, in powers of 2, below float16's largest number, a little less than 2^16.
HALF_SLACK: tl.constexpr = tl.constexpr(0.9)
ANY_NAN: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)


@triton.constexpr_function
def shift_of(dtype: tl.dtype) -> float:
    """The power of 2 that probabilities in `dtype` are multiplied by."""
    return HALF_SHIFT.value if dtype == tl.float16 else 0.0


@triton.jit
def weights(exponents, SHIFT: tl.constexpr):
    """2 to the exponents. Rounding puts exponents above SHIFT, by several where scores are many millions."""
    if SHIFT > 0.0:
        exponents = tl.minimum(exponents, SHIFT + HALF_SLACK, propagate_nan=ANY_NAN)
    return tl.exp2(exponents)


@triton.jit
def dot(a, b, WIDEN: tl.constexpr, acc=None):
    """a @ b, plus `acc` if there is one, in float32; products of float32 are IEEE's, not TF32.

    The interpreter multiplies bfloat16 wrongly, so there, and only there, bfloat16 operands are widened.
    """
    if WIDEN and a.dtype == tl.bfloat16:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        return product if acc is None else acc + product
    elif a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def in_half(q):
    """Bfloat16 q in float16, each row divided by a power of two, and these powers. Largest elements are then near 2^14.

    For products with keys in 8 bits, which all GPUs convert to float16 much faster than to bfloat16. Exact, except for
    elements about 2^30 times smaller than the largest of their row.
    """
    size = tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), 2.0**-60)
    power = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0**-14
    return (q.to(tl.float32) / power[:, None]).to(tl.float16), power


@triton.jit
def load_tile(pointers, rows, columns, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """A tile of memory, 0 where a row or column is masked: `rows` with MASK_ROWS, `columns` with MASK_COLUMNS."""
    if MASK_ROWS and MASK_COLUMNS:
        return tl.load(pointers, mask=rows[:, None] & columns[None, :], other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, mask=rows[:, None], other=0.0)
    elif MASK_COLUMNS:
        return tl.load(pointers, mask=columns[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def logits(products, first, position, slope, qk_scale, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr):
    """The softmax's inputs, in base 2, from the products of rows at `position` with keys from `first` on.

    With a soft cap c: c * tanh(s / c) (Gemma 2, arXiv:2408.00118); with ALiBi: plus slope * (key - position)
    (arXiv:2108.12409). `slope` is in base 2, as `qk_scale` is.
    """
    scores = products * qk_scale
    if SOFT_CAP is not None:
        # tanh(x) = 1 - 2 / (1 + e^2x). The bound keeps e^2x from overflowing; beyond it tanh is 1 in float32.
        power = tl.exp2(tl.minimum(scores * (2 / SOFT_CAP), 64.0))
        scores = SOFT_CAP * LOG2_E - (2 * SOFT_CAP * LOG2_E) / (1.0 + power)
    if ALIBI:
        columns = tl.arange(0, products.shape[1]).to(tl.float32)
        # The distance to the tile's first key is exact as an integer; the other keys add multiples of the slope.
        row_bias = slope * (first - position).to(tl.float32)
        scores += row_bias[:, None] + slope[:, None] * columns[None, :]
    return scores


@triton.jit
def narrow(x, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """Float32 x in `dtype`. The interpreter truncates to bfloat16, so there x is rounded to nearest even first."""
    if WIDEN and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)
