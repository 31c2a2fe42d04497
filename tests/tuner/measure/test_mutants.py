"""The inputs and the judge see every bug, at 128 and at 65,536 tokens, and pass what is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.oracle.needles import edge_positions
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.tuner.measure.check import Checker

from .mutants import MUTANTS, MaskOneTooMany, SplitAttention

LENGTHS = (128, 65536)
QUERY_LENS = {"decode": 1, "verify": 4, "chunk": 12}
# bfloat16 rounds more, so its bugs are harder to see.
KINDS = [("decode", "bfloat16"), ("verify", "bfloat16"), ("chunk", "bfloat16"), ("decode", "float16"),
         ("chunk", "float16")]  # fmt: skip
GROUP = 2
SEGMENT = 512


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    # The products are many and small, so more threads would only wait for each other.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_judge(kv_len: int, kind: str, dtype: str) -> Checker:
    """Two sequences, so that each has a neighbour; what each query head watches differs between them."""
    query_len = QUERY_LENS[kind]
    batch = Batch(((query_len, kv_len - query_len),) * 2)
    return Checker(AttentionSpec(2 * GROUP, 2, 32, dtype), batch, 16, "cpu")


class DecodeBySegments:
    """The right partial results of a decode, and the ratios when keys are left out of them."""

    def __init__(self, kv_len: int, dtype: str) -> None:
        self.judge = make_judge(kv_len, "decode", dtype)
        self.kv_len, self.dtype = kv_len, dtype
        self._attention = SplitAttention(self.judge, 16, SEGMENT)
        self._partials = self._attention.partials(victim=1)

    def ratios_without(self, keys: range) -> list[float]:
        """For each KV head, the worst ratio when it alone never reads `keys`, all of one segment."""
        partials = list(self._partials)
        struck = keys[0] // SEGMENT
        segment = self._attention.segments(victim=1)[struck]
        partials[struck] = self._attention.partial(1, segment[(segment < keys[0]) | (segment > keys[-1])])
        out = self._attention.merge(1, partials)
        ratios: list[float] = []
        for first in range(0, 2 * GROUP, GROUP):
            alone = self.judge.oracle.to(out.dtype)
            alone[:, first : first + GROUP] = out[:, first : first + GROUP]
            ratios.append(self.judge.judge(alone).worst_ratio)
        return ratios


# pytest runs the tests of one parameter together and then frees it: at 65,536 tokens each takes much memory.
@pytest.fixture(scope="module", params=[(n, dtype) for n in LENGTHS for dtype in ("bfloat16", "float16")])
def decode(request: pytest.FixtureRequest) -> DecodeBySegments:
    return DecodeBySegments(*request.param)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("kv_len", LENGTHS)
def test_right_attention_passes_and_every_mutant_is_rejected(kv_len: int, kind: str, dtype: str) -> None:
    judge = make_judge(kv_len, kind, dtype)
    for parts in (1, 2, 7):
        check = judge.judge(SplitAttention(judge, 16, -(-kv_len // parts)).output(victim=1))
        assert check.passed, check.detail
    for mutant in MUTANTS:
        if mutant is MaskOneTooMany and kind == "decode":
            # The one query token of a decode is the last: no later key exists.
            continue
        for place in (0.0, 0.4, 1.0) if mutant.strikes_somewhere else (0.0,):
            check = judge.judge(mutant(judge, 16, kv_len // 4, place).output(victim=1))
            assert not check.passed, f"{mutant.__name__} is not seen at {place}: {check.detail}"


def test_any_tile_skipped_in_one_kv_head_of_a_decode_is_seen(decode: DecodeBySegments) -> None:
    for first in range(0, decode.kv_len, max(16, decode.kv_len // 1024 * 16 + 16)):
        # One of 4,096 equally weighted keys is 2.6 times what is tolerated in bfloat16.
        ratios = decode.ratios_without(range(first, first + 16))
        assert min(ratios) > (2.0 if decode.dtype == "bfloat16" else 10.0), f"tile at {first}"


def test_one_key_too_few_at_a_guarded_place_is_seen(decode: DecodeBySegments) -> None:
    """Guarded are the first and last key of the context, those before and after each sixteenth of the sequence, 16 keys
    and a page times each power of two, the start of the last page; the row's own key. One KV head alone shows it.
    """
    for position in [*edge_positions(1, decode.kv_len - 1, page_size=16), decode.kv_len - 1]:
        assert min(decode.ratios_without(range(position, position + 1))) > 2.0, f"key {position}"


@pytest.mark.parametrize("kv_len", LENGTHS)
@pytest.mark.parametrize(("kind", "dtype"), [("verify", "bfloat16"), ("chunk", "bfloat16"), ("chunk", "float16")])
def test_one_key_too_many_is_seen_by_each_row_but_the_last(kv_len: int, kind: str, dtype: str) -> None:
    judge = make_judge(kv_len, kind, dtype)
    wrong = MaskOneTooMany(judge, 16, kv_len).output(victim=1)
    for row in range(QUERY_LENS[kind], 2 * QUERY_LENS[kind] - 1):
        out = judge.oracle.to(wrong.dtype)
        out[row] = wrong[row]
        assert judge.judge(out).worst_ratio > 10.0, f"row {row}"
