import pytest

from attention_tuner.kernel_templates.errors import GpuError
from attention_tuner.kernel_templates.gpu import Gpu, target


def test_a_target_is_found_by_name_and_an_unknown_one_names_what_there_is():
    assert target("sm_90").arch == 90
    with pytest.raises(GpuError, match=r"'sm_70'.*sm_80.*sm_120"):
        target("sm_70")


def test_the_slug_has_neither_spaces_nor_slashes():
    assert Gpu("NVIDIA RTX/6000  Ada", (8, 9), 142, 101376, 0).slug == "NVIDIA_RTX_6000_Ada"


@pytest.mark.parametrize("changes", [{"name": " "}, {"num_sms": 0}, {"shared_memory_bytes": 0}, {"l2_bytes": -1}])
def test_impossible_gpus_are_refused(changes: dict[str, object]):
    values = {"name": "x", "capability": (9, 0), "num_sms": 1, "shared_memory_bytes": 1, "l2_bytes": 0} | changes
    with pytest.raises(GpuError):
        Gpu(**values)
