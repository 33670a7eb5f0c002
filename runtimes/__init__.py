"""How each runtime opens, runs and profiles its work: a folder for each runtime, and the table that names them."""

# By the runtime's name (utils.fingerprint.RUNTIMES).
MODULES = {"ort": "runtimes.ort", "tvm": "runtimes.tvm"}


def worker_module(runtime: str) -> str:
    """The module that a worker process of `runtime` runs."""
    return f"{MODULES[runtime]}.worker"
