"""`python -m ditpar.conformance [FAMILY...] [--variant NAME]`: prints what is proved.

Exit code 0 when all is, 1 when a claim is not, 3 for an unknown family.
"""

from __future__ import annotations

import argparse
import sys

import diffusers
import torch

from ditpar.conformance.kit import conform
from ditpar.errors import ModelError
from ditpar.family import families


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m ditpar.conformance", description="Proves family records on tiny models."
    )
    parser.add_argument("family", nargs="*", help="family or transformer class; all families when none is given")
    parser.add_argument("--variant", help="only the variant of this name")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()  # the proofs call pipelines in ways that they warn of
    ok = True
    for name in given.family or list(families()):
        try:
            report = conform(name, given.variant)
        except ModelError as error:
            print(error, file=sys.stderr)
            return 3
        print(report, end="\n\n")
        ok = ok and report.ok
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
