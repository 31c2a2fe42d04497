"""Runs the command line: `python -m attention_tuner.tuner`."""

import sys

from .console.app import main

sys.exit(main())
