"""The command `python -m fp4_ops quantize`"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from torch import Tensor

from ..meta.formats import FORMATS
from ..models.outside_experts import KEEP, KINDS
from ..quantization import METHODS
from ..quantization.text import add_calibration_arguments, read_windows
from .convert import CONTINUES, quantize_checkpoint
from .folder import Folder

_LAYERS = {
    "attention": "attention's projections",
    "dense": "dense layers and shared experts",
    "head": "the output head",
}


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "quantize", help="quantise the experts of a checkpoint folder; a run that was killed is resumed"
    )
    parser.add_argument("model", metavar="MODEL_DIR", help="a folder of safetensors files and a config.json")
    parser.add_argument("-o", "--out", metavar="OUT", required=True, help="the folder to write")
    parser.add_argument(
        "--format", choices=list(FORMATS), default="nvfp4", help="format of the experts (default: nvfp4)"
    )
    needing = ", ".join(m.name for m in METHODS.values() if m.calibration != "none")
    parser.add_argument(
        "--method",
        choices=list(METHODS),
        default="rtn",
        help=f"how codes and block scales are chosen; {needing} need --calibration",
    )
    for kind in KINDS:
        parser.add_argument(
            f"--{kind}", choices=[KEEP, *FORMATS], default=KEEP,
            help=f"format of {_LAYERS[kind]} (default: keep, as they are)",
        )  # fmt: skip
    add_calibration_arguments(parser)
    parser.add_argument(
        "--device", default="cpu", help="where matrices are quantised, and the model runs (cpu, cuda)"
    )
    parser.set_defaults(run=_quantize)


def _quantize(args: argparse.Namespace) -> None:
    try:
        report = quantize_checkpoint(
            args.model, args.out, args.format, method=args.method, device=args.device,
            calibration=_calibration(args), batch=args.batch,
            **{kind: getattr(args, kind) for kind in KINDS},
        )  # fmt: skip
    except ValueError as error:
        sys.exit(str(error))
    except OSError as error:
        # A copy names its source and its result.
        files = " -> ".join(str(file) for file in (error.filename, error.filename2) if file) or args.out
        sys.exit(f"fp4: {files}: {error.strerror or error}. {CONTINUES}")
    print(report)
    print(
        f"Load it with fp4_ops.load_checkpoint(None, {str(args.out)!r}). Measure it with "
        f"python -m fp4_ops eval {shlex.quote(args.out)} --text FILE"
    )


def _calibration(args: argparse.Namespace) -> Tensor | None:
    if args.calibration is None:
        return None
    Folder(args.model)  # raises if it is not a checkpoint folder
    from transformers import AutoConfig

    vocab_size = AutoConfig.from_pretrained(args.model).get_text_config().vocab_size
    return read_windows(
        args.calibration, args.model, vocab_size, count=args.calibration_windows, length=args.length
    )
