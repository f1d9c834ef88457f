"""Runs scripts in processes that are forked from one that has imported PyTorch and telemetry.

The imports take seconds in a new interpreter. A forked process runs its script as ``__main__`` and
ends as an interpreter of its own does: with its exit handlers, by an exception or by a signal.

Started by ``scripts.py`` as ``fork_server.py DESCRIPTOR``; requests come through that socket.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys

import torch._dynamo  # the first optimizer imports it
import torch.utils.data
import torch.utils.tensorboard  # noqa: F401

from tests.helpers import known_runs, tiny_run  # noqa: F401


def serve(requests: socket.socket) -> list[str]:
    """Fork a process for each request; return there, with the script's path and arguments."""
    gc.collect()
    gc.freeze()  # else each end of a process takes a second for what was imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes processes that end
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 1 << 16, maxfds=3)
        if not message:
            sys.exit()
        if not os.fork():
            break
        for descriptor in descriptors:
            os.close(descriptor)
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *outputs, status = descriptors
    if script := os.fork():
        for descriptor in outputs:
            os.close(descriptor)
        os.write(status, b"%d\n" % script)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(script, 0)[1]))
        os._exit(0)
    os.close(status)
    for number, descriptor in enumerate(outputs, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    request = json.loads(message)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    command: list[str] = request["command"]
    return command


sys.argv = serve(socket.socket(fileno=int(sys.argv[1])))
__file__ = sys.argv[0]
sys.path[0] = os.path.dirname(__file__)
with open(__file__, encoding="utf-8") as source:
    exec(compile(source.read(), __file__, "exec"))
