"""Runs the command line: `python -m attention_tuner.tuner`."""

import sys

from .cli import main

sys.exit(main())
