import itertools

import pytest
import torch

from attention_tuner.kernel_templates.outcome import Regime
from attention_tuner.tuner.measure.race import DRIFT
from attention_tuner.tuner.measure.sentinel import Sentinel


def test_it_is_the_time_of_a_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[tuple[torch.Size, torch.Size]] = []
    multiply = torch.mm

    def mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        products.append((left.shape, right.shape))
        return multiply(left, right, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    assert Sentinel("cpu", (8, 16, 32), Regime("interpreter")).ms() > 0
    assert set(products) == {(torch.Size((8, 32)), torch.Size((32, 16)))}


@pytest.mark.gpu
def test_it_repeats_within_what_discards_a_block_unless_the_card_drifts() -> None:
    sentinel = Sentinel()
    for _ in range(200):
        sentinel.ms()
    times = [sentinel.ms() for _ in range(101)]
    assert 0.02 < times[50] < 2
    # The card may warm up meanwhile, and be throttled once or twice: of neighbouring readings, most agree.
    changes = sorted(abs(after / before - 1) for before, after in itertools.pairwise(times))
    assert changes[75] < DRIFT
