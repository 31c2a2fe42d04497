"""The errors this project raises on purpose.

    TunerError
    ├── InputError            unusable input of the user; a command ends with status 2
    │   ├── SpecError         an attention layer that cannot exist or is not supported
    │   ├── BatchError        a batch that cannot be read
    │   ├── VariantError      a variant that cannot be read, is unknown or is invalid here
    │   ├── GpuError          a GPU that is unknown or not present
    │   ├── ModelError        a model preset, suite or config.json that cannot be used
    │   └── StoreError        a database or exported file that cannot be opened, read or written
    ├── JobError              a job without a result; defined in `outcome`, because it names the variant at fault
    ├── NotTunedError         a lookup whose answer comes from a source that the caller does not accept
    └── NothingValidError     no valid variant; a command ends with status 1

A failure inside one trial is an `Outcome`, not an exception.
"""

from __future__ import annotations


class TunerError(Exception):
    """Base of all errors raised on purpose."""

    # Exit status of a command.
    exit_status = 1


class InputError(TunerError):
    """Unusable input of the user."""

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


class NotTunedError(TunerError):
    """A lookup whose answer comes from a source that the caller does not accept."""


class NothingValidError(TunerError):
    """No valid variant."""
