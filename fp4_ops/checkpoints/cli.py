"""python -m fp4_ops quantize"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..meta.formats import FORMATS
from ..quantization import METHODS
from .convert import quantize_checkpoint


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "quantize", help="quantise the experts of a checkpoint folder; a run that was killed is resumed"
    )
    parser.add_argument("model", metavar="MODEL_DIR", help="a folder of safetensors files and a config.json")
    parser.add_argument("-o", "--out", metavar="OUT", required=True, help="the folder to write")
    parser.add_argument("--format", choices=list(FORMATS), default="nvfp4")
    methods = [m.name for m in METHODS.values() if m.calibration == "none"]
    parser.add_argument("--method", choices=methods, default="rtn", help="how block scales are chosen")
    parser.add_argument("--device", default="cpu", help="where matrices are quantised (cpu, cuda)")
    parser.set_defaults(run=_quantize)


def _quantize(args: argparse.Namespace) -> None:
    try:
        report = quantize_checkpoint(
            args.model, args.out, args.format, method=args.method, device=args.device
        )
    except ValueError as error:
        sys.exit(str(error))
    print(report)
