"""What the kernels share of arithmetic, and what the interpreter needs of it in bfloat16."""

# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

# Finite, so that a row that sees no key of an item has weight 0 and not NaN.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def dot(a, b, WIDEN: tl.constexpr):
    """a @ b in float32. The interpreter multiplies bfloat16 wrongly, so there, and only there, operands are widened."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def narrow(x, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """x, float32, in `dtype`. The interpreter cuts off the low bits of bfloat16: there, round to nearest even first."""
    if WIDEN and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)
