"""A build backend that makes `pip install .` fail with a message that says what to do instead.

Hase can't be installed, since names of its folders, such as `utils` and `records`, would clash with other packages.
"""

from __future__ import annotations

from typing import Any, NoReturn

MESSAGE = ("Hase is a folder of scripts and is not installed itself: install what it needs with `pip install -r "
           "requirements-predict.txt` (or requirements.txt, to measure and learn too), run the scripts in this folder, and put "
           "the folder on PYTHONPATH for programs that say `from inference import predict`")


def refuse(*_: Any, **__: Any) -> NoReturn:
    """Ends the build with the message."""
    raise SystemExit(MESSAGE)


get_requires_for_build_wheel = get_requires_for_build_editable = get_requires_for_build_sdist = refuse
build_wheel = build_editable = build_sdist = refuse  # required by PEP 517 and PEP 660
