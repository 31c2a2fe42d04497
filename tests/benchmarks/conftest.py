import sys
from pathlib import Path

# Scripts import each other by name, and so do the helpers of the tuner's tests.
BENCHMARKS, TUNER_TESTS = Path(__file__).parents[2] / "benchmarks", Path(__file__).parents[1] / "tuner"
sys.path.extend(map(str, (BENCHMARKS, BENCHMARKS / "recordings", TUNER_TESTS, Path(__file__).parent / "recordings")))
