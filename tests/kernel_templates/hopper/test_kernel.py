"""Compiles for Hopper, in child processes: this one interprets."""

from gluon_samples import HOPPER, SPEC, variant_of

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.hopper.kernel import REGISTERS_OF_ALL
from attention_tuner.kernel_templates.hopper.template import GLUON_HOPPER, shared_memory_bytes
from attention_tuner.kernel_templates.outcome import StaticFacts
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.tuner.processes.compile import CompileJob, CompilePool

BATCH = Batch.parse("1x64@100,2x1@100")
COMPILED = [
    (SPEC, variant_of(16)),
    (SPEC, variant_of(128, num_stages=3, registers=232, partials="bfloat16")),
    (AttentionSpec(7, 1, 64, "float16"), variant_of(48, order="items")),
    (AttentionSpec(8, 2, 256), variant_of(16, block_n=64)),
    (SPEC, variant_of(16, block_n=64, num_stages=6, dispatch="dynamic")),
    (SPEC, variant_of(16, reduction="last_program")),
    (SPEC, variant_of(16, block_n=64, num_stages=6, dispatch="dynamic", reduction="last_program")),
    (AttentionSpec(8, 2, 256), variant_of(16, block_n=64, reduction="last_program")),
]


def test_it_compiles_to_warpgroup_products_within_the_shared_memory_foretold():
    with CompilePool(processes=2) as pool:
        for spec, variant in COMPILED:
            pool.submit(CompileJob(variant, spec, HOPPER, BATCH))
        found = {}
        while pool.pending:
            found |= {build.job.variant: build.result for build in pool.results(wait_s=120)}
    for spec, variant in COMPILED:
        facts = found[variant]
        assert isinstance(facts, StaticFacts), facts
        assert facts.tensor_core == "wgmma.mma_async"
        foretold = shared_memory_bytes(variant, spec)
        assert foretold - 1024 <= facts.shared_bytes <= foretold
        # As many as three warpgroups can start with; what spills are values of the masked and the last steps.
        assert facts.registers == 168
        assert facts.stack_bytes is not None
        assert facts.stack_bytes <= 352


def test_what_loads_gets_the_registers_that_are_left():
    (choices,) = (one.choices for one in GLUON_HOPPER.dimensions if one.name == "registers")
    left = [REGISTERS_OF_ALL.value - 2 * int(registers) for registers in choices]
    # As `setmaxnreg` takes them: 24 at least, in steps of 8.
    assert all(registers >= 24 and registers % 8 == 0 for registers in left)
