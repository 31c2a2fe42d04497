from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from cli_samples import SPEC

from attention_tuner.kernel_templates.errors import InputError, SpecError
from attention_tuner.tuner.console import options
from attention_tuner.tuner.console.options import Layers


def test_numbers_are_read() -> None:
    assert [options.whole_number(text) for text in ("1", str(2**32 - 1))] == [1, 2**32 - 1]
    assert options.seed_number("0") == 0
    assert options.positive_seconds("0.5") == 0.5
    assert options.percentage("15%") == 15


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (options.whole_number, "0"),
        (options.whole_number, "-3"),
        (options.whole_number, "1.5"),
        (options.whole_number, "9" * 5000),
        (options.seed_number, "-1"),
        (options.seed_number, str(2**32)),
        (options.positive_seconds, "0"),
        (options.positive_seconds, "nan"),
        (options.positive_seconds, "inf"),
        (options.positive_seconds, "soon"),
        (options.percentage, "101"),
        (options.percentage, "nan"),
    ],
)
def test_other_numbers_are_refused(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(typer.BadParameter, match="cannot be used; accepted is"):
        read(text)


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="is a folder"):
        options.database(str(tmp_path))
    for name in (str(tmp_path / "new.db"), "postgresql+psycopg://user@host/name"):
        assert options.database(name) == name


def test_layers_of_a_model_are_divided_and_have_the_dtype_asked_for() -> None:
    (layer,) = Layers(model="llama-3-8b", tp=2, dtype="float16").specs()
    assert (layer.num_q_heads, layer.num_kv_heads, layer.dtype) == (16, 4, "float16")
    assert Layers(model="llama-3-8b").specs()[0].dtype == "bfloat16"
    assert [layer.sliding_window for layer in Layers(model="gpt-oss-20b", tp=8).specs()] == [128, None]


def test_a_key_names_every_feature_of_a_layer() -> None:
    key = ("num_q_heads=64,num_kv_heads=8,head_dim=192,dtype=float16,kv_dtype=float8_e5m2,sliding_window=128,"
           "logits_soft_cap=30.0,has_sinks=True,has_alibi=True,scale=0.1,v_head_dim=128,has_tree_mask=True")
    (layer,) = Layers(spec=key).specs()
    assert (layer.v_head_dim, layer.sliding_window, layer.has_tree_mask) == (128, 128, True)
    assert layer.key() == key
    assert Layers(spec=key).counts() == {layer: 1}


def test_the_cache_and_the_queries_have_the_dtypes_asked_for() -> None:
    (layer,) = Layers(model="llama-3-8b", kv_dtype="float8_e4m3fn", q_dtype="float8_e5m2").specs()
    assert (layer.dtype, layer.kv_dtype, layer.q_dtype) == ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    plain = Layers(model="llama-3-8b")
    assert replace(plain, kv_dtype="auto", q_dtype="auto").specs() == plain.specs()
    with pytest.raises(SpecError, match=r"'llama-3-8b'.* a KV cache in 'float8_e5m2' beside 'float32' queries"):
        replace(plain, dtype="float32", kv_dtype="float8_e5m2").specs()
    with pytest.raises(SpecError, match=r"'llama-3-8b'.* queries in 'float8_e5m2' beside a cache in 'bfloat16'"):
        replace(plain, q_dtype="float8_e5m2").specs()


def test_all_layers_of_a_model_can_verify_trees() -> None:
    asked = Layers(model="gpt-oss-20b", tp=8, tree=True)
    assert all(layer.has_tree_mask for layer in asked.specs())
    assert list(asked.counts().values()) == [12, 12]


def test_options_that_describe_a_layer_need_one() -> None:
    described = [Layers(tp=8), Layers(dtype="float16"), Layers(kv_dtype="auto"), Layers(q_dtype="auto"),
                 Layers(tree=True)]
    for layers in described:
        for specs in (layers.specs, layers.specs_or_all):
            with pytest.raises(InputError, match=r"describes a layer, and no layer is named; add --model"):
                specs()
        with pytest.raises(InputError, match="does not go with --spec"):
            replace(layers, spec=SPEC.key()).specs()
    with pytest.raises(InputError, match="--model"):
        Layers().specs()
    with pytest.raises(InputError, match="exclude each other"):
        Layers(model="llama-3-8b", spec=SPEC.key()).specs()
    assert Layers().specs_or_all() is None
    assert Layers(spec=SPEC.key()).specs_or_all() == (SPEC,)


def test_an_unknown_dtype_is_refused_with_those_accepted() -> None:
    plain = Layers(model="llama-3-8b")
    with pytest.raises(SpecError, match=r"--dtype 'int3' .* accepted are bfloat16, float16, float32"):
        replace(plain, dtype="int3").specs()
    with pytest.raises(SpecError, match=r"--kv-dtype 'fp8' .* accepted are auto, float8_e4m3fn, float8_e5m2"):
        replace(plain, kv_dtype="fp8").specs()
    with pytest.raises(SpecError, match=r"--q-dtype 'float16' .* accepted are auto, float8_e4m3fn, float8_e5m2"):
        replace(plain, q_dtype="float16").specs()
