"""python -m fp4_ops <command>"""

from __future__ import annotations

import argparse

from .info import info


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fp4_ops", description="4-bit Mixture-of-Experts for PyTorch"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "info", help="print versions, what was built, this machine, and which kernels will run"
    )
    parser.parse_args(arguments)
    print(info())


if __name__ == "__main__":
    main()
