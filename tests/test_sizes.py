"""No endless file or function, and imports at the top. Exceptions are listed with a reason.

The limits are loose on purpose: good modules of the field have 250 lines on average (asv 230, pyperf 258) and some have twice
that. They stop a file that grows without end. They are no reason to split what belongs together, or to extract a function
without a good name.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator

from test_layers import FILES

from hase.utils.paths import ROOT

MOST_LINES = 500  # of a file
MOST_FUNCTION_LINES = 100
LONG_FILES: dict[str, str] = {}  # file: why it is longer
LONG_FUNCTIONS: dict[str, str] = {}  # file:function: why it is longer
NOT_FOR_A_PREDICTION = "most predictions do not need what it loads"
IN_FUNCTIONS: dict[tuple[str, str], str] = {  # (file, module imported in a function): why it is not at the top
    ("inference/core/host_pace.py", "hase.benchmark.ort.probes"): NOT_FOR_A_PREDICTION,
    ("inference/core/model_run.py", "hase.graph_model.simulation.dag"): NOT_FOR_A_PREDICTION,
    ("inference/core/predictor.py", "hase.inference.core.missing_kernels"): NOT_FOR_A_PREDICTION,
    ("inference/core/predictor.py", "hase.inference.live.watch"): NOT_FOR_A_PREDICTION,
    ("inference/live/load.py", "hase.inference.live.prometheus_readings"): NOT_FOR_A_PREDICTION,
    ("inference/live/prometheus.py", "hase.inference.live.timed_http"): NOT_FOR_A_PREDICTION,
    ("inference/predict_model_latency.py", "hase.graph_model.simulation.dag"): NOT_FOR_A_PREDICTION,
    ("inference/predict_model_latency.py", "hase.inference.live.watch"): NOT_FOR_A_PREDICTION,
    ("inference/sharing/co_runner.py", "hase.benchmark.ort.sharing_probe"): NOT_FOR_A_PREDICTION,
    ("recipes/operating/grafana_dashboard.py", "hase.recipes.operating.grafana_panels"): "needs a package that the options do not",
    ("recipes/kinds/recipe_list.py", "hase.recipes.kinds"): "its networks are subclasses of torch's, so torch is loaded with them",
    ("ort_analysis/graph/half_precision.py", "onnxruntime.transformers.float16"): NOT_FOR_A_PREDICTION,
    ("learned/kernels/predictors.py", "hase.learned.kernels.admitted"): NOT_FOR_A_PREDICTION,
    ("recipes/gpus/judge_vision.py", "timm.utils.model"): "timm loads torch, and the options need neither",
}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def imports_in_functions(tree: ast.AST) -> list[str]:
    """The modules that a module's functions import, once for each line."""
    imports = {(node.lineno, alias.name if isinstance(node, ast.Import) else str(node.module))
               for function in functions(tree) for node in ast.walk(function)
               if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    return [module for _, module in sorted(imports)]


@functools.cache
def trees() -> dict[str, ast.Module]:
    """By file."""
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def test_no_file_is_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    long = {name: count for name, count in lines.items() if count > MOST_LINES}
    assert long.keys() == LONG_FILES.keys(), long


def test_no_function_is_long() -> None:
    long = {f"{name}:{function.name}": (function.end_lineno or 0) - function.lineno + 1
            for name, tree in trees().items() for function in functions(tree)
            if (function.end_lineno or 0) - function.lineno >= MOST_FUNCTION_LINES}
    assert long.keys() == LONG_FUNCTIONS.keys(), long


def test_imports_are_at_the_top() -> None:
    """Slow packages too: hase.utils.lazy binds them there and loads them at their first use."""
    imports = Counter((name, module) for name, tree in trees().items() for module in imports_in_functions(tree))
    assert imports == Counter(IN_FUNCTIONS.keys()), "import at the top, slow packages by hase.utils.lazy; or list it with its reason"


def test_imports_in_functions_are_detected() -> None:
    text = ("import a\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import b\n"
            "def one():\n    import c.d\n    from e import f, g\n    def inner():\n        import h\n"
            "class K:\n    def two(self):\n        try:\n            import i\n        except ImportError:\n            pass\n")
    assert imports_in_functions(ast.parse(text)) == ["c.d", "e", "h", "i"]
