"""What every command line of Hase shares; used as `from utils import cli`."""

from utils.cli.option_types import address, count, counts, out_file, pace, percentile, port, positive, whole
from utils.cli.options import (
    add_dim,
    add_estimators,
    add_load,
    add_model,
    add_run_mode,
    add_static,
    add_target,
    add_trust,
    branch_as_size,
    combinations,
    one_size_dims,
    parse_dims,
)
from utils.cli.parsing import EXIT_USAGE, parser, start
from utils.cli.printing import cell, column_widths, first_of, print_json, print_line, print_rows, print_table
from utils.cli.progress_bar import progress
from utils.cli.running import EXIT_ROUGH, EXIT_SLO_MISSED, LEFT_OUT, OS_ERROR_ADVICE, explain, is_command, run

__all__ = [
    "EXIT_ROUGH",
    "EXIT_SLO_MISSED",
    "EXIT_USAGE",
    "LEFT_OUT",
    "OS_ERROR_ADVICE",
    "add_dim",
    "add_estimators",
    "add_load",
    "add_model",
    "add_run_mode",
    "add_static",
    "add_target",
    "add_trust",
    "address",
    "branch_as_size",
    "cell",
    "column_widths",
    "combinations",
    "count",
    "counts",
    "explain",
    "first_of",
    "is_command",
    "one_size_dims",
    "out_file",
    "pace",
    "parse_dims",
    "parser",
    "percentile",
    "port",
    "positive",
    "print_json",
    "print_line",
    "print_rows",
    "print_table",
    "progress",
    "run",
    "start",
    "whole",
]
