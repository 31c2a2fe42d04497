from __future__ import annotations

import json

import pytest
from portfolio_samples import GPU, MIDDLE, SMALL, A, B, best_config

from attention_tuner.kernel_templates.outcome import Regime, Timing
from attention_tuner.tuner.console.verify_report import print_verified
from attention_tuner.tuner.verify import BEATEN, HELD, UNDECIDED, Verified


def timing(ms: float) -> Timing:
    return Timing((ms,), Regime("graph"))


FOUND = [
    Verified(best_config(SMALL, A), HELD, timing(1.02), A, 1.02),
    Verified(best_config(MIDDLE, A, 2.0), BEATEN, timing(2.0), B, 1.5, retuned=best_config(MIDDLE, B, 1.5)),
    Verified(best_config(MIDDLE, A, 2.0), UNDECIDED),
]


def test_each_winner_is_told_with_its_times_and_what_beats_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_verified("tuner.db", GPU, FOUND, 4, as_json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert "8x1@1100 16 held 1 ms 1.02 ms (+2.0%) itself" in out
    assert "beaten" in out
    assert "2 ms (+0.0%)" in out
    assert "1 held, 1 beaten, 1 undecided; 1 tuned anew" in out
    assert "4 best configs of tuner.db measured with what is here now" in out


def test_the_document_has_what_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    print_verified("tuner.db", GPU, FOUND, 0, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["states"] == {"held": 1, "beaten": 1, "undecided": 1}
    held, beaten, undecided = document["verified"]
    assert (held["state"], held["ratio"], held["fastest"]) == ("held", pytest.approx(1.02), A.key())
    assert (beaten["fastest"], beaten["retuned"], beaten["retuned_ms"]) == (B.key(), B.key(), 1.5)
    assert (undecided["now_ms"], undecided["ratio"], undecided["retuned"]) == (None, None, None)
