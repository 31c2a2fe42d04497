import sys
from pathlib import Path

# Tests share samples as plain modules.
sys.path.append(str(Path(__file__).parent))
