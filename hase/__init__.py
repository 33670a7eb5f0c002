"""Predicts how long ONNX Runtime takes to run a model on a device.

In a clone, the folders of the package (`utils`, `records`, …) lie at the root of the repository, so that every phase is seen
there; `hase.utils` is found through `__path__`. The links beside this file say the same to type checkers and editors, which do
not run it. In a wheel, the folders lie beside this file.
"""

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
if (_ROOT / "pyproject.toml").is_file():
    __path__ = [str(_ROOT), *__path__]
