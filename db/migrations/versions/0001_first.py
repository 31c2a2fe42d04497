"""Runs, trials and best configs."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _measured_columns() -> list[sa.Column[object]]:
    """The columns that trials and best configs share."""
    texts = ("spec", "bucket", "batch", "template", "variant", "regime", "gpu_name", "gpu_capability", "gpu_driver",
             "kernel_hash", "triton", "torch", "driver", "measured_at")
    numbers = ("page_size", "gpu_num_sms", "gpu_shared_memory_bytes", "gpu_l2_bytes")
    return [
        sa.Column("id", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in texts),
        *(sa.Column(name, sa.Integer, nullable=False) for name in numbers),
    ]


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("started_at", sa.Text, nullable=False),
        sa.Column("settings", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_table(
        "trials",
        *_measured_columns(),
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        *(sa.Column(name, sa.Text) for name in ("stage", "reason", "check_level", "check_detail", "samples_ms",
                                                "timing_regime", "tensor_core", "code_hash")),
        *(sa.Column(name, sa.Double) for name in ("check_ratio", "plan_ms")),
        *(sa.Column(name, sa.Integer) for name in ("shared_bytes", "registers", "stack_bytes")),
        sa.PrimaryKeyConstraint("id", name="pk_trials"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_trials_run_id"),
    )
    op.create_index("ix_trials_spec_bucket_page_size_gpu_name", "trials", ["spec", "bucket", "page_size", "gpu_name"])
    op.create_table(
        "best_configs",
        *_measured_columns(),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("samples_ms", "default_samples_ms", "default_regime",
                                                                "verdict", "check_level")),
        *(sa.Column(name, sa.Double, nullable=False) for name in ("plan_ms", "default_plan_ms")),
        sa.PrimaryKeyConstraint("id", name="pk_best_configs"),
        sa.UniqueConstraint("spec", "bucket", "batch", "page_size", "gpu_name", "gpu_num_sms", "regime",
                            name="uq_best_configs"),
    )


def downgrade() -> None:
    """Drop the tables."""
    for table in ("best_configs", "trials", "runs"):
        op.drop_table(table)
