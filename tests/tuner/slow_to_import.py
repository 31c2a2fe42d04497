"""A module that takes its time, as torch does from a cold disk."""

import os
import time

time.sleep(float(os.environ["SLOW_S"]))
