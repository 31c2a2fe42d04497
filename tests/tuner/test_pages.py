from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from portfolio_samples import GPU, SPEC, best_config, unified

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import InputError
from attention_tuner.kernel_templates.outcome import BestConfig
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.tuner.pages import compare, read_lengths, token_bytes

SMALL, MIDDLE, LARGE = (Batch.parse(text) for text in ("8x1@1100", "8x1@2000", "8x1@4000"))
WINDOWED = replace(SPEC, sliding_window=1024)
ONE = {SPEC: 1}


def tuned(batch: Batch, page_size: int, ms: float, spec: AttentionSpec = SPEC) -> BestConfig:
    config = best_config(batch, unified(16, page_size=page_size), ms)
    return replace(config, shape=replace(config.shape, spec=spec))


CONFIGS = [
    tuned(SMALL, 16, 1.0), tuned(MIDDLE, 16, 4.0),
    tuned(SMALL, 64, 0.9), tuned(MIDDLE, 64, 4.0),
    tuned(SMALL, 256, 0.9), tuned(MIDDLE, 256, 3.9),
]  # fmt: skip


def test_a_page_size_has_the_times_of_all_batches_and_the_memory_of_its_last_pages() -> None:
    (found,) = compare(CONFIGS, ONE)
    assert [size.page_size for size in found.sizes] == [16, 64, 256]
    first = found.sizes[0]
    assert first.mean_ms == pytest.approx(2.0)
    assert first.sum_ms == pytest.approx(5.0)
    # Eight sequences of 1,101 keys and eight of 2,001; a token has 2 KV heads of 64 for K and for V, of two bytes.
    assert token_bytes(ONE) == 512
    assert first.lost_bytes == (8 * 3 + 8 * 15) * 512
    assert first.held_bytes == (8 * 1104 + 8 * 2016) * 512
    assert first.lost_share == pytest.approx(144 / 24960)
    assert found.sizes[2].lost_bytes == (8 * 179 + 8 * 47) * 512


def test_the_nearly_fastest_size_that_loses_the_least_memory_is_recommended() -> None:
    (found,) = compare(CONFIGS, ONE)
    assert [found.slowdown(size) for size in found.sizes] == [
        pytest.approx((4 / 3.51) ** 0.5 - 1), pytest.approx((3.6 / 3.51) ** 0.5 - 1), 0.0]
    assert [found.recommended(within).page_size for within in (0.0, 3.0, 10.0)] == [256, 64, 16]


def test_without_lost_memory_the_fastest_size_is_recommended() -> None:
    (found,) = compare(CONFIGS, ONE, lengths=[256, 512])
    assert [size.lost_bytes for size in found.sizes] == [0, 0, 0]
    assert found.recommended(100.0).page_size == 256


def test_the_time_of_a_batch_is_that_of_all_layers() -> None:
    layers = {SPEC: 2, WINDOWED: 10}
    configs = [*CONFIGS, tuned(SMALL, 16, 0.5, WINDOWED), tuned(SMALL, 64, 0.4, WINDOWED)]
    (found,) = compare(configs, layers)
    assert found.batches == (SMALL,)
    assert [size.times_ms for size in found.sizes] == [pytest.approx((2 + 5,)), pytest.approx((1.8 + 4,))]
    assert token_bytes(layers) == 12 * 512


def test_only_batches_tuned_with_all_sizes_are_compared() -> None:
    (found,) = compare([*CONFIGS, tuned(LARGE, 16, 9.0)], ONE)
    assert found.batches == (SMALL, MIDDLE)
    assert found.left_out == {LARGE: (64, 256)}
    (some,) = compare([*CONFIGS, tuned(LARGE, 16, 9.0), tuned(LARGE, 64, 9.0)], ONE, pages=(16, 64))
    assert some.batches == (SMALL, MIDDLE, LARGE)
    assert compare(CONFIGS, ONE, pages=(16,)) == []
    assert compare([tuned(SMALL, 16, 1.0), tuned(MIDDLE, 64, 1.0)], ONE) == []
    assert compare(CONFIGS, {WINDOWED: 1}) == []
    gone = [replace(config, variant=replace(config.variant, template="gone")) for config in CONFIGS]
    assert compare([*CONFIGS[:2], *gone], ONE) == []


def test_times_measured_with_different_versions_are_marked() -> None:
    newer = replace(CONFIGS[0].environment, driver="590.2")
    hashed = replace(CONFIGS[0].environment, kernel_hash="other")
    for environment, is_mixed in ((newer, True), (hashed, False)):
        (found,) = compare([replace(CONFIGS[0], environment=environment), *CONFIGS[1:]], ONE)
        assert found.is_mixed == is_mixed


def test_each_gpu_is_compared_by_itself() -> None:
    other = replace(GPU, name="NVIDIA H100")
    found = compare([*CONFIGS, *(replace(config, gpu=other) for config in CONFIGS)], ONE)
    assert [each.gpu.name for each in found] == [GPU.name, other.name]


@pytest.mark.parametrize("text", ["1000,2000,17", "1000 2000\n17\n", "[1000, 2000, 17]"])
def test_lengths_are_read_from_a_file_as_from_the_command_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text(text)
    assert read_lengths(str(tmp_path / "lengths")) == (1000, 2000, 17)
    assert read_lengths("1000,2000,17") == (1000, 2000, 17)


@pytest.mark.parametrize("text", [
    "", "x", "[1.5]", "[true]", "{}", "0", "-1", "99999999999", "9" * 5000, "1;2", "[" * 100_000, "\x00"])
def test_what_holds_no_lengths_is_refused_by_its_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=r"trace\.txt"):
        read_lengths(str(path))


def test_lengths_that_are_no_file_are_refused(tmp_path: Path) -> None:
    for text in ("nowhere.txt", str(tmp_path), "0", "a\x00b", ""):
        with pytest.raises(InputError):
            read_lengths(text)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="binary"):
        read_lengths(str(tmp_path / "binary"))
