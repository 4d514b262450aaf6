"""Commands that measure what 4 bits cost in accuracy: `python -m fp4_ops eval` and `report`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoints.folder import Folder, check_folder
from .meta.arguments import whole_number
from .meta.formats import FORMATS
from .meta.text import first_line
from .quantization.activations import ACTIVATION_MODES
from .quantization.calibration import Calibration, calibrate
from .quantization.evaluation import HEAD, Stored, evaluate
from .quantization.methods import METHODS
from .quantization.report import error_report
from .quantization.text import add_calibration_arguments, check_text, read_windows
from .runtime.devices import usable_device


def add_commands(commands: Any) -> None:
    """Adds both commands to `commands`, the result of `ArgumentParser.add_subparsers`."""
    parser = commands.add_parser(
        "eval", help="perplexity and agreement with bf16 of every format, method and activation mode"
    )
    _add_common(parser)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text to evaluate on")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument(
        "--activations", nargs="+", choices=list(ACTIVATION_MODES), default=list(ACTIVATION_MODES)
    )
    parser.add_argument(
        "--windows",
        type=whole_number(1),
        default=64,
        help="most windows of the text that are evaluated (default: 64)",
    )
    parser.add_argument("--json", type=Path, help="also write the table here")
    parser.set_defaults(run=partial(_run, _eval))

    parser = commands.add_parser("report", help="weight errors of every layer and expert")
    _add_common(parser)
    parser.add_argument("--format", choices=list(FORMATS), default="nvfp4")
    parser.add_argument("--method", choices=list(METHODS), default="rtn")
    parser.add_argument("--json", type=Path, help="write every expert's errors here")
    parser.add_argument("--picture", type=Path, help="write a heat map, experts x layers, here (matplotlib)")
    parser.set_defaults(run=partial(_run, _report))


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder or name for from_pretrained")
    add_calibration_arguments(parser)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def _run(command: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Runs a command. If the model or text does not fit, exits with the message and no traceback."""
    try:
        usable_device(args.device)
        for file in (getattr(args, "text", None), args.calibration):
            if file is not None:
                check_text(file)
        command(args)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def _eval(args: argparse.Namespace) -> None:
    model, stored = _load(args)
    windows = _windows(args, model, args.text, args.windows)
    calibration = _calibration(args, model, args.methods)
    print(f"{len(windows)} windows of {args.length} tokens\n{HEAD}\n{'-' * len(HEAD)}", flush=True)
    table = evaluate(
        model,
        windows,
        formats=args.formats,
        methods=args.methods,
        activations=args.activations,
        calibration=calibration,
        batch=args.batch,
        on_row=partial(print, flush=True),
        stored=stored,
    )
    if args.json:
        args.json.write_text(table.to_json() + "\n")


def _report(args: argparse.Namespace) -> None:
    if args.picture and find_spec("matplotlib") is None:
        raise ValueError(f"fp4: --picture {args.picture} needs matplotlib: pip install matplotlib")
    model, _ = _load(args)
    report = error_report(model, args.format, args.method, _calibration(args, model, [args.method]))
    print(report)
    if args.json:
        args.json.write_text(report.to_json() + "\n")
    if args.picture:
        report.save_picture(args.picture)


def _load(args: argparse.Namespace) -> tuple[nn.Module, dict[str, Stored]]:
    """Loads the model with ordinary weights. Also returns the expert weights that are in 4 bits already."""
    _check_name(args.model)
    from .integrations.transformers.reference import load_reference  # which imports transformers

    try:
        model, stored = load_reference(args.model, args.device, torch.bfloat16)
    except ValueError:
        raise
    except Exception as error:  # of transformers and safetensors
        if Path(args.model).is_dir():
            Folder(args.model)  # raises if it can say more
        reason = first_line(str(error)).rstrip(".")
        at_hub = (
            ". It must be a local folder, or the name of a model on the Hugging Face hub that can be reached"
        )
        more = "" if Path(args.model).is_dir() else at_hub
        raise ValueError(
            f"fp4: {args.model} cannot be loaded: {type(error).__name__}: {reason}{more}"
        ) from None
    if stored:
        print(
            f"{args.model} is in 4 bits already. Its values in bfloat16 are the reference here, and every "
            "method quantises them a second time"
        )
    return model, stored


def _check_name(model: str) -> None:
    """Raises ValueError for a name that is no folder and that the hub cannot give. transformers would ask the
    hub again and again, for a minute."""
    if os.path.lexists(model):
        check_folder(Path(model))
        return
    from huggingface_hub import constants, get_session, try_to_load_from_cache
    from huggingface_hub.utils import validate_repo_id

    words = f"fp4: {model} is not a folder here"
    try:
        validate_repo_id(model)
    except ValueError:
        raise ValueError(
            f"{words}, and it cannot be a name of the Hugging Face hub (ORGANISATION/MODEL)"
        ) from None
    if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # of the hub's client, which was requests and is httpx
        raise ValueError(
            f"{words}, and the Hugging Face hub, which may have a model of this name, cannot be reached "
            f"({constants.ENDPOINT}: {first_line(str(error))}). Give a local folder"
        ) from None


def _calibration(args: argparse.Namespace, model: nn.Module, methods: list[str]) -> Calibration | None:
    kinds = {METHODS[m].calibration for m in methods} - {"none"}
    if not kinds:
        return None
    if args.calibration is None:
        left_out = ", ".join(m for m in methods if METHODS[m].calibration != "none")
        print(f"no --calibration text, so these methods are left out: {left_out}", flush=True)
        return None
    windows = _windows(args, model, args.calibration, args.calibration_windows)
    print(f"calibration: the model reads {len(windows)} windows of {args.length} tokens", flush=True)
    return calibrate(model, windows, full="full" in kinds, batch=args.batch)


def _windows(args: argparse.Namespace, model: Any, file: Path, count: int) -> Tensor:
    vocab_size = model.config.get_text_config().vocab_size
    windows = read_windows(file, args.model, vocab_size, count=count, length=args.length)
    return windows.to(args.device)
