"""Exit codes, and the one line that says why."""

from __future__ import annotations

import json
import sys

from ditpar.errors import DitparError, GangError

OK, USAGE, INADMISSIBLE, ENGINE, INTERRUPTED = 0, 2, 3, 5, 130


def code_of(error: BaseException) -> int:
    """2 usage, 3 inadmissible request, plan or model, 5 engine fault, 130 interrupt."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, GangError) or not isinstance(error, DitparError):
        return ENGINE
    return INADMISSIBLE


def report(error: BaseException, as_json: bool) -> int:
    """Says on stderr (or as JSON on stdout) what went wrong; returns the exit code."""
    code = code_of(error)
    text = "interrupted" if code == INTERRUPTED else str(error) or type(error).__name__
    if code == INADMISSIBLE:
        text = " ".join(text.split())
    if as_json:
        print(json.dumps({"error": {"type": type(error).__name__, "message": text, "exit": code}}))
    elif code == ENGINE:
        print(f"ditpar: engine fault: {type(error).__name__}: {text}", file=sys.stderr)
    else:
        print(f"ditpar: {text}", file=sys.stderr)
    return code
