"""`python -m ditpar.conformance [FAMILY...]`: prints what is proved; exit code 1 when a claim is false."""

from __future__ import annotations

import sys

import diffusers
import torch

from ditpar.conformance.kit import conform
from ditpar.errors import ModelError
from ditpar.family import families


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()  # the proofs call pipelines in ways that they warn of
    ok = True
    for name in names or list(families()):
        try:
            report = conform(name)
        except ModelError as error:
            print(error, file=sys.stderr)
            return 3
        print(report, end="\n\n")
        ok = ok and report.ok
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
