import importlib.metadata
import re

import pytest

from attention_tuner.kernel_templates.errors import TunerError
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.limits import SHARED_SOURCES
from attention_tuner.kernel_templates.sources import environment, kernel_hash
from attention_tuner.kernel_templates.template import templates


def test_every_template_has_a_hash_over_the_kernels_that_it_runs():
    for name, template in templates().items():
        assert re.fullmatch("[0-9a-f]{16}", kernel_hash(name))
        assert set(SHARED_SOURCES) <= set(template.sources)
    assert kernel_hash("unified") != kernel_hash("fused")


def test_a_template_that_is_not_installed_is_refused():
    with pytest.raises(TunerError, match="'none' is not installed"):
        kernel_hash("none")


def test_an_environment_names_what_runs_here():
    found = environment("fused", TARGETS["sm_90"])
    assert (found.kernel_hash, found.driver) == (kernel_hash("fused"), "")
    assert found.triton == importlib.metadata.version("triton")
