"""Fails when a tracked Python file has more than 400 lines: a file has one idea."""

import subprocess
import sys
from pathlib import Path

LIMIT = 400

files = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
long = [f"{name}: {count} lines" for name in files if (count := len(Path(name).read_text().splitlines())) > LIMIT]
if long:
    sys.exit(f"over {LIMIT} lines:\n" + "\n".join(long))
