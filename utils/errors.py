"""The one error class whose message is meant for the user; anything else that escapes is a bug and keeps its traceback.

Also which errors say that the machine lacked something.
"""

from __future__ import annotations

import errno
import os

MACHINE_LACKS = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # disk space, open files, memory


class UserError(Exception):
    """Something the user can mend: the message says what is wrong, where, and what to do."""


class OpenSizes(UserError):
    """Dimensions of a model are open.

    Attributes:
        said: which; the message adds the options.
        options: of a command, that give them sizes which fit the model.
    """

    def __init__(self, said: str, options: str) -> None:
        super().__init__(f"{said}, for example {options}")
        self.said, self.options = said, options


class DeviceUnavailable(UserError):
    """This process can't use a device; where the machine has it, another process may be able to."""


def machine_lacks(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, says that the machine lacked disk space, memory or open files.

    Libraries report such an error as text of their own, so the system's message is looked for, too.
    """
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in MACHINE_LACKS) or any(
                os.strerror(number) in str(error) for number in MACHINE_LACKS):
            return True
        error = error.__cause__ or error.__context__
    return False
