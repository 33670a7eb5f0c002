"""The function of a kernel in a file of its own, from which TVM builds it anywhere: a line that describes the kernel, as JSON,
and TVM's own text of the function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hase.records.kernel_record import Kernel
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.lazy import tvm, tvm_ffi
from hase.utils.paths import Workspace

SUFFIX = ".tvm"
MAIN = "main"
REMAKE = "remove it, and make it anew with: python runtimes/tvm/relax_parser.py"


def hash_of(function: Any) -> str:
    """16 digits: the same for functions that compute the same in the same way, whatever their names."""
    return f"{tvm_ffi.structural_hash(function.without_attr('global_symbol')) & (2**64 - 1):016x}"


def function_path(workspace: Workspace, flavour: Flavour, kernel: str) -> Path:
    """The file of a kernel's function, by the kernel's id."""
    return workspace.kernel_onnx / flavour.name / f"{kernel}{SUFFIX}"


def write_functions(workspace: Workspace, flavour: Flavour, kernels: Mapping[str, Kernel],
                    functions: Mapping[str, Any]) -> None:
    """Writes the functions of kernels, by id; those that are there are left as they are."""
    for name, function in functions.items():
        path = function_path(workspace, flavour, name)
        if not path.is_file():
            write_function(path, kernels[name], function)


def write_function(path: Path, kernel: Kernel, function: Any) -> None:
    """Writes one function and its kernel, in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    module = tvm.IRModule({MAIN: function.without_attr("global_symbol")})
    files.write_text(path, f"{kernel.model_dump_json()}\n{tvm.ir.save_json(module)}")


def _lines(path: Path) -> tuple[str, str]:
    """The two parts of the file of a function: the kernel, and the function.

    Raises:
        UserError: it is missing, or no such file.
    """
    try:
        kernel, _, function = path.read_text(encoding="utf-8").partition("\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such function; make it with: python runtimes/tvm/relax_parser.py") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a function of TVM ({error}); {REMAKE}") from None
    return kernel, function


def read_kernel(path: Path) -> Kernel:
    """The kernel that the function in a file computes.

    Raises:
        UserError: the file is missing, or describes no kernel.
    """
    try:
        return Kernel.model_validate_json(_lines(path)[0])
    except ValidationError as error:
        raise UserError(f"{path}: its first line describes no kernel ({error.errors()[0]['msg']}); {REMAKE}") from None


def read_function(path: Path) -> Any:
    """The function in a file.

    Raises:
        UserError: it is missing, or no function of this TVM.
    """
    try:
        return tvm.ir.load_json(_lines(path)[1])[MAIN]
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"{path}: not a function of this TVM ({error}); {REMAKE}") from None
