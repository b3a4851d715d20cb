"""Triton kernels, each beside its plain-torch reference: the files of the repository's folder kernels/.

That folder has no `__init__.py`, so that with the repository root on sys.path it is a mere namespace portion and
never stands in for the library called `kernels`, which diffusers and transformers probe for. This module finds the
folder where it lies: inside the package in a wheel, beside it in a source tree.
"""

from pathlib import Path

_here = Path(__file__).parent
__path__ = [str(next(folder for folder in (_here / "kernels", _here.parent / "kernels") if folder.is_dir()))]
