"""A `python` for shells that forks each command from one process, which has imported what takes seconds.

Each command still has a process of its own, with the arguments, folder and streams that the shell gives it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVER = """
import atexit, contextlib, gc, importlib, json, os, runpy, socket, sys, threading, traceback

def run(argv):
    sys.argv, code = argv, 0
    try:
        if argv[0] == "-":
            exec(compile(sys.stdin.read(), "-", "exec"), {"__name__": "__main__"})
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)  # the ends of C++ libraries wait for threads that the fork left behind

address, *modules = sys.argv[1:]
sys.path[0] = os.getcwd()
importlib.import_module("hase.utils.processes").die_with_parent()
for module in modules:
    importlib.import_module(module)
server = socket.socket(socket.AF_UNIX)
server.bind(address)
server.listen()
gc.freeze()
while True:
    client, _ = server.accept()
    told, streams, _, _ = socket.recv_fds(client, 1 << 16, 3)
    if not (child := os.fork()):
        server.close()
        client.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        folder, argv = json.loads(told)
        os.chdir(folder)
        run(argv)
    for stream in streams:
        os.close(stream)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):  # who asked has gone
        client.sendall(str(code).encode())
    client.close()
"""
CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [json.dumps([os.getcwd(), sys.argv[1:]]).encode()], [0, 1, 2])
    sys.exit(int(server.recv(8)))
"""


@contextmanager
def forked_python(folder: Path, at: Path, modules: tuple[str, ...], environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of a shell whose `python` is this one: a program in `folder`, for the repository `at`. Each command finds
    `modules` imported, none of which may start threads."""
    address, client = folder / "socket", folder / "python"
    client.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    client.chmod(0o755)
    environment = environment | {"PATH": f"{folder}{os.pathsep}{environment['PATH']}"}
    with subprocess.Popen([sys.executable, "-c", SERVER, str(address), *modules], cwd=at, env=environment) as server:
        try:
            while not address.exists():
                assert server.poll() is None
                time.sleep(0.05)
            yield environment
        finally:
            server.kill()
