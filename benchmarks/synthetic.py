"""Synthetic tables for benchmarks of the lookup: shipped configs, spread over layers, page sizes and batches."""

from __future__ import annotations

import random
from dataclasses import replace

from attention_tuner.db.lookup.lookup import shipped_configs
from attention_tuner.kernel_templates.batch import Batch, BatchBucket, Shape
from attention_tuner.kernel_templates.outcome import BestConfig
from attention_tuner.kernel_templates.registry import template_of

LAYERS = 40


def batch(draw: random.Random) -> Batch:
    """A random batch of a serving engine: chunks beside decode, or one of them alone."""
    long = [(draw.choice((128, 512, 2048)), draw.randint(0, 60_000))] * draw.choice((0, 1, 1, 2))
    short = [(draw.choice((1, 1, 4)), draw.randint(16, 120_000))] * draw.choice((0, 1, 7, 30, 64, 200))
    return Batch(tuple(long + short)) if long or short else batch(draw)


def configs(count: int, seed: int = 0) -> list[BestConfig]:
    """`count` configs of an H200 for distinct questions, with times and variants of shipped configs."""
    draw = random.Random(seed)
    shipped = [config for config in shipped_configs() if config.gpu.name == "NVIDIA H200"]
    # A variant that never splits KV does not answer for every bucket.
    shipped = [each for each in shipped if not template_of(each.variant).never_splits_kv(each.variant)]
    found: dict[tuple[object, ...], BestConfig] = {}
    while len(found) < count:
        asked = batch(draw)
        bucket = BatchBucket.of(asked)
        # As in a real table, the variant is from a batch with the same parts.
        alike = [c for c in shipped if all(c.shape.bucket.has_part(p) == bucket.has_part(p) for p in ("short", "long"))]
        config = draw.choice(alike)
        spec = replace(config.shape.spec, num_q_heads=8 * draw.randint(1, LAYERS), num_kv_heads=8)
        question = (spec, str(asked), config.variant.page_size)
        found[question] = replace(config, shape=Shape(spec, bucket), batch=str(asked))
    return list(found.values())
