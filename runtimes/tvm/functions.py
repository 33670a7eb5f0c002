"""The function of a kernel in a file of its own, from which TVM builds it anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from records.kernel_record import Kernel
from utils import files
from utils.errors import UserError
from utils.fingerprint import Flavour
from utils.lazy import tvm, tvm_ffi
from utils.paths import Workspace

SUFFIX = ".tvm"  # of a kernel's function; the kernel itself is in the JSON file next to it
MAIN = "main"


def hash_of(function: Any) -> str:
    """16 digits: the same for functions that compute the same in the same way, whatever their names."""
    return f"{tvm_ffi.structural_hash(function.without_attr('global_symbol')) & (2**64 - 1):016x}"


def function_path(workspace: Workspace, flavour: Flavour, kernel: str) -> Path:
    """The file of a kernel's function, by the kernel's id."""
    return workspace.kernel_onnx / flavour.name / f"{kernel}{SUFFIX}"


def write_functions(workspace: Workspace, flavour: Flavour, kernels: Mapping[str, Kernel],
                    functions: Mapping[str, Any]) -> None:
    """Writes the functions of kernels, by id, with the kernels; those that are there are left as they are."""
    for name, function in functions.items():
        path = function_path(workspace, flavour, name)
        if not path.is_file():
            write_function(path, kernels[name], function)


def write_function(path: Path, kernel: Kernel, function: Any) -> None:
    """Writes one function and its kernel, in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    module = tvm.IRModule({MAIN: function.without_attr("global_symbol")})
    files.write_text(path.with_suffix(".json"), kernel.model_dump_json())
    files.write_text(path, str(tvm.ir.save_json(module)))


def read_kernel(path: Path) -> Kernel:
    """The kernel that the function in a file computes.

    Raises:
        UserError: its description is missing or damaged.
    """
    try:
        return Kernel.model_validate_json(path.with_suffix(".json").read_bytes())
    except (FileNotFoundError, ValidationError) as error:
        raise UserError(f"{path.with_suffix('.json')}: describes no kernel ({str(error).splitlines()[0]}); remove both files, "
                        "and make them anew with: python tvm_analysis/relax_parser.py") from None


def read_function(path: Path) -> Any:
    """The function in a file.

    Raises:
        UserError: it is missing, or no function of this TVM.
    """
    try:
        return tvm.ir.load_json(path.read_text(encoding="utf-8"))[MAIN]
    except FileNotFoundError:
        raise UserError(f"{path}: no such function; make it with: python tvm_analysis/relax_parser.py") from None
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"{path}: not a function of this TVM ({error}); remove it, and make it anew with: "
                        "python tvm_analysis/relax_parser.py") from None
