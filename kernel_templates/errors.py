"""Every error this project raises on purpose.

    TunerError
    ├── InputError            what the user gave cannot be used; a command ends with status 2
    │   ├── SpecError         an attention layer that cannot exist or is not supported
    │   ├── BatchError        a batch that cannot be read
    │   ├── VariantError      a variant that cannot be read, is unknown or is invalid here
    │   ├── GpuError          a GPU that is unknown or not present
    │   ├── ModelError        a model preset, suite or config.json that cannot be used
    │   └── StoreError        a database or exported file that cannot be opened, read or written
    ├── JobError              a job gave no result; an outcome of the variant that is to blame, where there is one
    ├── NotTunedError         a lookup's answer would be worse than the one that asked for it accepts
    └── NothingValidError     no valid variant was found; a command ends with status 1

What goes wrong inside one trial is an `Outcome`, not an exception.
"""


from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .variant import Variant


class TunerError(Exception):
    """Base of all errors raised on purpose; `exit_status` is what a command ends with."""

    exit_status = 1


class InputError(TunerError):
    """What the user gave cannot be used."""

    exit_status = 2


class SpecError(InputError):
    """An attention layer that cannot exist or needs a feature that is not supported."""


class BatchError(InputError):
    """A batch that cannot be read or has impossible lengths."""


class VariantError(InputError):
    """A variant that cannot be read, is unknown or cannot run here."""


class GpuError(InputError):
    """A GPU that is unknown or not present."""


class ModelError(InputError):
    """A model preset, suite or config.json that cannot be used."""


class StoreError(InputError):
    """A database or exported file that cannot be opened, read or written."""


class JobError(TunerError):
    """A job raised, or its process died or exceeded its limit.

    `stage` and `variant` are what the job had last said it was at: "" and None where it had said nothing.
    """

    def __init__(self, reason: str, stage: str = "", variant: Variant | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.stage = stage
        self.variant = variant


class NotTunedError(TunerError):
    """A lookup's answer would come from further down the chain of fall-backs than its caller accepts."""


class NothingValidError(TunerError):
    """No valid variant was found."""
