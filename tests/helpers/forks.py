"""Starts processes that have already imported torch, transformers and this package.

Importing them takes ten times as long as most of the scripts that tests run. A server of the test session
imports them once and forks for each script. A fork has no state of a test's process. But tests about imports,
memory, or values that differ between processes (addresses, Python's hashes) need new processes.

`python forks.py SOCKET PID` is the server. It ends together with process PID, which is that of the session.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

END = b"\0"
"""Ends a request."""


def session() -> int:
    """Return the process id of the session. xdist's workers are its children."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def connect() -> socket.socket:
    """Connect to this session's server, which the first call starts."""
    started = Path(f"/proc/{session()}/stat").read_text().rpartition(")")[2].split()[19]
    folder = Path(tempfile.gettempdir(), f"fp4_forks_{session()}_{started}")
    folder.mkdir(exist_ok=True)
    path, connection = folder / "socket", socket.socket(socket.AF_UNIX)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker starts it
        if not path.exists():
            command, log = [sys.executable, __file__, str(path), str(session())], folder / "log"
            with log.open("w") as file:
                server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            while not path.exists():
                assert server.poll() is None, f"the server of forks ended:\n{log.read_text()}"
                time.sleep(0.05)
        connection.connect(str(path))
    return connection


class Forked:
    """A process like `subprocess.Popen`, for a script in a fork."""

    def __init__(self, args: list[str], env: dict[str, str], cwd: str, merged: bool) -> None:
        """args: the arguments of Python: -W ignore, then a script, -c CODE or -m MODULE, then the script's
        arguments."""
        self.returncode: int | None = None
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        errors = self._out if merged else self._err
        self._connection = connect()
        request = json.dumps({"args": args, "env": env, "cwd": cwd}).encode() + END
        socket.send_fds(self._connection, [request], [self._out.fileno(), errors.fileno()])

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        self._connection.settimeout(timeout)
        try:
            self.returncode = int(self._connection.recv(64))
        finally:
            self._connection.close()  # ends the process if it still runs
        return self.output(), self.output(self._err)

    def output(self, file: Any = None) -> bytes:
        """Return what it has printed so far."""
        file = file or self._out
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


def start(
    args: list[str], env: dict[str, str] | None = None, cwd: str | Path | None = None, merged: bool = False
) -> Forked:
    """Start a script in a fork. `merged`: stderr is a part of the output."""
    return Forked(args, dict(os.environ if env is None else env), str(cwd or os.getcwd()), merged)


def run(
    args: list[str], env: dict[str, str] | None = None, cwd: str | Path | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Return the same as `subprocess.run` for [sys.executable, *args], as text."""
    forked = start(args, env, cwd)
    out, err = (part.decode() for part in forked.communicate(timeout))
    assert forked.returncode is not None
    return subprocess.CompletedProcess(args, forked.returncode, out, err)


def become(request: dict[str, Any]) -> None:
    """Run the requested script, as Python does with these arguments."""
    import runpy
    import warnings

    args = request["args"]
    os.chdir(request["cwd"])
    for name in os.environ.keys() - request["env"].keys():
        del os.environ[name]
    os.environ.update(request["env"])
    paths = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    own = str(Path(__file__).parent)
    sys.path[:] = [*paths, *(path for path in sys.path if path != own and path not in paths)]
    if args[0] == "-W":
        warnings.simplefilter(args[1])
        args = args[2:]
    if args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        sys.path.insert(0, "")
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(args[1], "<string>", "exec"), main.__dict__)
    elif args[0] == "-m":
        sys.argv = list(args[1:])
        sys.path.insert(0, request["cwd"])
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(args)
        sys.path.insert(0, str(Path(args[0]).parent))
        runpy.run_path(args[0], run_name="__main__")


def child(request: dict[str, Any], files: list[int]) -> int:
    """Run the request. Return the exit status that a separate process would have."""
    import atexit
    import traceback

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor, file in zip((1, 2), files, strict=True):
        os.dup2(file, descriptor)
    try:
        become(request)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def accept(listener: socket.socket) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Return a connection, what it asks for, and the files for output and errors."""
    connection, _ = listener.accept()
    data, files, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    while not data.endswith(END):
        data += connection.recv(1 << 16)
    return connection, json.loads(data[: -len(END)]), list(files)


def serve(path: Path, session: int) -> None:
    prepare()
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    listener = socket.socket(socket.AF_UNIX)
    part = path.with_suffix(".part")
    listener.bind(str(part))
    listener.listen(64)
    part.rename(path)
    running: dict[int, socket.socket] = {}
    while Path(f"/proc/{session}").exists():
        ready, _, _ = select.select([listener, wake, *running.values()], [], [], 2)
        for pid, connection in running.items():
            if connection in ready:  # closed by the client
                kill(pid)
        if listener in ready:
            connection, request, files = accept(listener)
            if not (pid := os.fork()):
                os.setsid()
                for other in (listener, connection, *running.values()):
                    other.close()
                os._exit(child(request, files))
            running[pid] = connection
            for file in files:
                os.close(file)
        if wake in ready:
            os.read(wake, 4096)
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with running.pop(ended[0]) as connection, contextlib.suppress(OSError):
                connection.sendall(str(os.waitstatus_to_exitcode(ended[1])).encode())
    for pid in running:
        kill(pid)
    shutil.rmtree(path.parent)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def prepare() -> None:
    """Import modules that take long, but none that starts a thread."""

    import fp4_ops.backend
    import fp4_ops.compile_passes.pipeline
    import fp4_ops.prepare  # noqa: F401

    with contextlib.suppress(ImportError):
        import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
    gc.freeze()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
