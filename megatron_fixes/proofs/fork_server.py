# SPDX-License-Identifier: Apache-2.0
"""Starts the parents of trees as forks of a process that has imported torch, and nothing of Megatron.

Of the seconds that a parent's imports take, most go to torch and to what Megatron has torch load, which is the same
for every tree. A server does that once; a fork of it is given all that a process of its own would have: environment,
working directory, output, and a place for temporary files.

Each server runs one parent at a time and belongs to the process that started it. A starter that dies, however it
dies, closes its end of the server's socket: then the server kills its parent and ends. If the server dies, the kernel
kills the parent, and so the ranks (``ranks.die_with``).

Not handled: ``PYTHONPATH``, and variables that torch reads when it is imported, count as they were when the server was
started.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from typing import TYPE_CHECKING, NoReturn, TextIO

from megatron_fixes import config
from megatron_fixes.proofs.ranks import die_with

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import IO

# What Megatron's modules, and the ranks, have torch load; a torch that has it not loads its own later.
PRELOADED = (
    "torch",
    "torch.utils.cpp_extension",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed._shard.sharded_tensor",
    "torch.distributed._tensor",
    "torch._dynamo.convert_frame",
    "torch._inductor.compile_fx",
    "torch.export._trace",
    "torch.profiler._cupti_monitor",
    "functorch",
    "triton",
    "einops",
    "einops._torch_specific",
    "yaml",
)
_LENGTH, _CODE = struct.Struct("!I"), struct.Struct("!i")
_WAIT, _KILL = b"w", b"k"


class Server:
    """The starter's end of a server."""

    def __init__(self, environment: Mapping[str, str], cwd: str, log: IO[str]) -> None:
        self.control, theirs = socket.socketpair()
        command = [sys.executable, "-W", "ignore", "-m", "megatron_fixes.proofs.fork_server", str(theirs.fileno())]
        # The overlay is a parent's own: an installed .pth would turn it on here already.
        variables = {**environment, config.FIXES: "none"}
        with theirs:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=variables, cwd=cwd, pass_fds=[theirs.fileno()]
            )

    def end(self) -> int:
        """End the server, with a parent that still runs; return its exit code."""
        self.control.close()
        return self.process.wait()


_idle: list[Server] = []


@atexit.register
def _end_all() -> None:
    while _idle:
        _idle.pop().end()


class Parent:
    """A parent that a server forked.

    Attributes:
        stdout: What it prints.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], cwd: str, log: IO[str]) -> None:
        """Start it.

        Args:
            arguments: For ``parent.main``.
            environment: All its variables.
            cwd: Its working directory, which is not on its ``sys.path``.
            log: Open file for what it says on stderr.
        """
        self._code: int | None = None
        self._asked = False
        self._lock = threading.Lock()
        while _idle and _idle[-1].process.poll() is not None:
            _idle.pop().end()
        self._server = _idle.pop() if _idle else Server(environment, cwd, log)
        read, write = os.pipe()
        self.stdout: TextIO = os.fdopen(read)
        request = json.dumps({"arguments": [*arguments], "environment": {**environment}, "cwd": cwd}).encode()
        try:
            # A server that could not start is told by wait().
            with contextlib.suppress(ConnectionError):
                socket.send_fds(self._server.control, [_LENGTH.pack(len(request))], [write, log.fileno()])
                self._server.control.sendall(request)
        finally:
            os.close(write)

    def _ask(self, what: bytes) -> None:
        with self._lock:
            if not self._asked:
                self._asked = True
                with contextlib.suppress(ConnectionError):
                    self._server.control.sendall(what)

    def kill(self) -> None:
        """Kill it; nothing happens if it is being waited for. To be waited for after that."""
        self._ask(_KILL)

    def wait(self) -> int:
        """Wait for its end; return its exit code, negative for a signal, or the server's if that ended."""
        if self._code is None:
            self._ask(_WAIT)
            self.stdout.close()
            try:
                said = self._server.control.recv(_CODE.size, socket.MSG_WAITALL)
            except ConnectionError:
                said = b""
            if len(said) == _CODE.size:
                (self._code,) = _CODE.unpack(said)
                _idle.append(self._server)
            else:
                self._code = self._server.end()
        return self._code


def preload() -> None:
    """Import what every parent needs. No collections: nothing of this is to be freed (as in ``parent.load``)."""
    # Lets torch look for devices without CUDA's own start, which no fork survives.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    gc.disable()
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    importlib.import_module("megatron_fixes.proofs.parent")
    gc.freeze()
    gc.enable()


def serve(control: socket.socket) -> None:
    """Fork a parent a request, until the starter closes its end."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(control, _LENGTH.size, 2)
        if len(head) < _LENGTH.size:
            return
        (length,) = _LENGTH.unpack(head)
        request = json.loads(control.recv(length, socket.MSG_WAITALL))
        server = os.getpid()
        child = os.fork()
        if child == 0:
            control.close()
            _become_parent(server, *descriptors, **request)
        for descriptor in descriptors:
            os.close(descriptor)
        asked = control.recv(1)
        if asked != _WAIT:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not asked:
            return
        control.sendall(_CODE.pack(code))


def _become_parent(
    server: int, stdout: int, log: int, *, arguments: list[str], environment: dict[str, str], cwd: str
) -> NoReturn:
    code = 1
    # Whatever happens, this child must end here and not go on as a second server.
    try:
        die_with(server)
        os.dup2(stdout, 1)
        os.dup2(log, 2)
        os.close(stdout)
        os.close(log)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        tempfile.tempdir = None
        from megatron_fixes.proofs import parent

        sys.argv = [parent.__file__, *arguments]
        code = parent.main(arguments)
    except BaseException:  # noqa: BLE001 - its starter is told by the last line and the exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(arguments: Sequence[str]) -> None:
    """Import, and serve the socket that was handed over."""
    # -m has put the working directory on the path, which is the first parent's and goes with it.
    here = os.getcwd()
    sys.path[:] = [entry for entry in sys.path if entry != here]
    preload()
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    serve(socket.socket(fileno=int(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
    # The end of an interpreter that has imported all this takes a second.
    os._exit(0)
