"""python -m fp4_ops <command>"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from . import accuracy, selftest
from .checkpoints import cli as checkpoints_cli
from .compile_passes import cli as compile_cli
from .info import info
from .runtime import tune
from .runtime.libraries import libraries


def main(arguments: list[str] | None = None) -> None:
    with _while_read():
        _run(arguments)


def _run(arguments: list[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fp4_ops", description="4-bit Mixture-of-Experts for PyTorch"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "info", help="print versions, what was built, this machine, and which kernels will run"
    )
    command.set_defaults(run=lambda args: print(info()))
    command = commands.add_parser(
        "libraries",
        help="print the libraries that register the operators, for a program without Python to load",
    )
    command.set_defaults(run=lambda args: print(*libraries(), sep="\n"))
    selftest.add_commands(commands)
    tune.add_commands(commands)
    checkpoints_cli.add_commands(commands)
    compile_cli.add_commands(commands)
    accuracy.add_commands(commands)
    args = parser.parse_args(arguments)
    with _quiet():
        args.run(args)


@contextmanager
def _while_read() -> Iterator[None]:
    """Ends the program as SIGPIPE would, without a traceback, if the reader of its output has gone, as `head`
    does.
    """
    try:
        try:
            yield
        except SystemExit:
            print(end="", flush=True)
            raise
        print(end="", flush=True)
    except BrokenPipeError:
        gone = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream.fileno())]
        if not gone:  # another pipe or a socket
            raise
        for stream in gone:  # Python writes what they still hold when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _has_no_reader(file: int) -> bool:
    poll = select.poll()
    poll.register(file, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides what torchao, which transformers imports, logs about its own files and calls."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


if __name__ == "__main__":
    main()
