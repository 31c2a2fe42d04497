import math

import pytest
import torch
import triton
import triton.language as tl

from attention_tuner.kernel_templates.triton_family.arithmetic import (
    HALF_SHIFT,
    dot,
    in_half,
    load_tile,
    logits,
    narrow,
    shift_of,
    weights,
)


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


@triton.jit
def in_half_kernel(q, out, powers, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    place = row[:, None] * SIZE + row[None, :]
    half, power = in_half(tl.load(q + place))
    tl.store(out + place, half)
    tl.store(powers + row, power)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_in_half_are_exact_whatever_the_size_of_others():
    q = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    q *= 2.0 ** torch.arange(-56, 104, 10)[:, None].to(q)
    q[2], q[3, 5] = 0, torch.inf
    out, powers = torch.empty(16, 16, dtype=torch.float16), torch.empty(16)
    in_half_kernel[(1,)](q, out, powers, 16)
    others = torch.arange(16) != 3
    assert torch.equal(out[others].double() * powers[others].double()[:, None], q[others].double())
    largest = out[others & (torch.arange(16) != 2)].abs().amax(1)
    assert bool(((largest >= 2**14) & (largest < 2**15)).all())
    assert not bool(out[3].isfinite().all())


@triton.jit
def weights_kernel(x, out, SIZE: tl.constexpr, SHIFT: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, weights(tl.load(x + place), SHIFT).to(out.dtype.element_ty))


def test_weights_in_half_have_a_shift_and_never_overflow():
    shift = HALF_SHIFT.value
    assert [shift_of(dtype) for dtype in (tl.float16, tl.bfloat16, tl.float32)] == [shift, 0.0, 0.0]
    x = torch.tensor([-torch.inf, -14.0, 0.0, shift, shift + 0.5, shift + 8, torch.inf, torch.nan])
    out = torch.empty(8, dtype=torch.float16)
    weights_kernel[(1,)](x, out, 8, shift)
    assert torch.equal(out[:5], x[:5].exp2().half())
    assert bool((out[5:7] > out[4]).all() and out[5:7].isfinite().all() and out[7].isnan())
    wide = torch.empty(8)
    weights_kernel[(1,)](x, wide, 8, 0.0)
    assert torch.equal(wide[:7], x[:7].exp2())


@triton.jit
def logits_kernel(x, position, slope, out, first, scale, SIZE: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr):
    row = tl.arange(0, SIZE)
    place = row[:, None] * SIZE + row[None, :]
    found = logits(tl.load(x + place), first, tl.load(position + row), tl.load(slope + row), scale, CAP, ALIBI)
    tl.store(out + place, found)


@pytest.mark.parametrize("cap", [None, 0.5, 30.0, 1e4])
@pytest.mark.filterwarnings("error")
def test_a_soft_cap_is_a_tanh_that_nothing_overflows(cap: float | None):
    x = torch.cat((torch.linspace(-1e5, 1e5, 128), torch.linspace(-40, 40, 128))).view(16, 16)
    x[0, :3] = torch.tensor([0.0, 1e-6, 1e30])
    out, zeros = torch.empty(16, 16), torch.zeros(16)
    logits_kernel[(1,)](x, zeros.int(), zeros, out, 0, math.log2(math.e), 16, cap, False)
    wide = x.double()
    expected = math.log2(math.e) * (wide if cap is None else cap * torch.tanh(wide / cap))
    assert torch.allclose(out.double(), expected, rtol=1e-6, atol=1e-6 * (cap or 1))


def test_alibi_is_exact_near_the_query_even_at_a_million_tokens():
    position, slope = 2**20 + torch.arange(16, dtype=torch.int32), torch.linspace(0.001, 8, 16)
    for first in (0, 2**19, 2**20):
        out = torch.empty(16, 16)
        logits_kernel[(1,)](torch.zeros(16, 16), position, slope, out, first, 1.0, 16, None, True)
        distance = first + torch.arange(16) - position[:, None]
        assert torch.allclose(out.double(), slope.double()[:, None] * distance, rtol=1e-6, atol=1e-5)


@triton.jit
def load_kernel(x, out, SIZE: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.arange(0, SIZE)
    place = row[:, None] * SIZE + row[None, :]
    tl.store(out + place, load_tile(x + place, row < KEPT, row < KEPT + 1, ROWS, COLUMNS))


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_a_tile_is_masked_only_where_it_is_to_be(rows: bool, columns: bool):
    x, out = torch.rand(16, 16) + 1, torch.empty(16, 16)
    load_kernel[(1,)](x, out, 16, 5, rows, columns)
    expected = x.clone()
    expected[5 if rows else 16 :] = 0
    expected[:, 6 if columns else 16 :] = 0
    assert torch.equal(out, expected)
