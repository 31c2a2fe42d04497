import importlib.metadata
import re
from pathlib import Path

import pytest

from attention_tuner.kernel_templates import sources
from attention_tuner.kernel_templates.errors import TunerError
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.limits import SHARED_SOURCES
from attention_tuner.kernel_templates.registry import templates
from attention_tuner.kernel_templates.sources import environment, kernel_hash
from attention_tuner.kernel_templates.template import Template


def test_every_template_has_a_hash_over_the_kernels_that_it_runs():
    for name, template in templates().items():
        assert re.fullmatch("[0-9a-f]{16}", kernel_hash(name))
        assert set(SHARED_SOURCES) <= set(template.sources)
    assert kernel_hash("unified") != kernel_hash("fused")


@pytest.mark.parametrize("module", ["launcher", "batch", "fused", "fused_launch", "attention", "spec", "plan"])
def test_a_change_of_any_of_its_modules_changes_the_hash(module: str, monkeypatch: pytest.MonkeyPatch):
    before = kernel_hash("fused")
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(path) + b"#" * (path.stem == module and "kernel_templates" in path.parts)
    )
    assert kernel_hash.__wrapped__("fused") != before


def test_a_template_that_is_not_installed_is_refused():
    with pytest.raises(TunerError, match="'none' is not installed"):
        kernel_hash("none")


def test_an_environment_names_what_runs_here():
    found = environment("fused", TARGETS["sm_90"])
    assert (found.kernel_hash, found.driver) == (kernel_hash("fused"), "")
    assert found.triton == importlib.metadata.version("triton")


def test_a_version_under_another_name_is_unknown(monkeypatch: pytest.MonkeyPatch):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    sources._version.cache_clear()
    try:
        found = environment("fused", TARGETS["sm_90"])
        assert (found.triton, found.torch) == ("", real("torch"))
    finally:
        sources._version.cache_clear()


@pytest.mark.parametrize("launcher", ["no_such_package.module:Launcher", "no_such_module:Launcher"])
def test_a_template_whose_launcher_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch, launcher: str):
    monkeypatch.setitem(templates(), "gone", Template("gone", launcher, ()))
    with pytest.raises(TunerError, match=r"'gone' names module 'no_such_.*', which cannot be found"):
        kernel_hash("gone")
