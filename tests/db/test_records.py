from __future__ import annotations

import pytest

from attention_tuner.db.records import Setting, TrialRecord
from attention_tuner.kernel_templates.errors import TunerError
from attention_tuner.kernel_templates.outcome import Environment, Skipped
from attention_tuner.kernel_templates.variant import Variant


def test_a_trial_has_one_page_size(setting: Setting):
    variant = Variant.of("unified", 32, {})
    with pytest.raises(TunerError, match="page size 16"):
        TrialRecord(1, setting, Environment("", "", "", ""), Skipped(variant, "no"))
