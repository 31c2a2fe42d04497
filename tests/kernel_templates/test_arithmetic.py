import torch
import triton
import triton.language as tl

from attention_tuner.kernel_templates.arithmetic import dot, narrow


@triton.jit
def narrow_kernel(x, out, SIZE: tl.constexpr, WIDEN: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, narrow(tl.load(x + place), out.dtype.element_ty, WIDEN))


@triton.jit
def dot_kernel(a, b, out, SIZE: tl.constexpr, WIDEN: tl.constexpr):
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + place, dot(tl.load(a + place), tl.load(b + place), WIDEN))


def test_the_interpreter_rounds_to_nearest_even_in_bfloat16_and_leaves_other_dtypes_alone():
    x = torch.randn(256, generator=torch.Generator().manual_seed(0))
    x[:2] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = torch.empty(256, dtype=dtype)
        narrow_kernel[(1,)](x, out, 256, True)
        assert torch.equal(out, x.to(dtype))


def test_the_interpreter_multiplies_bfloat16_in_float32():
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=draw).bfloat16() for _ in range(2))
    out = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, out, 16, True)
    assert torch.allclose(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
