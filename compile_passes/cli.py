"""`python -m fp4_ops explain MODULE:FACTORY`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..meta.formats import FORMATS
from .options import ACTIVATION_CHOICES


def add_commands(commands: Any) -> None:
    """Add the command to `commands`, the result of `ArgumentParser.add_subparsers`."""
    parser = commands.add_parser(
        "explain",
        help="say what torch.compile(backend='fp4') rewrites in a model, and why it leaves the rest alone",
    )
    parser.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="a function without arguments that returns (model, args) or (model, args, kwargs)",
    )
    parser.add_argument("--format", choices=list(FORMATS), default="nvfp4")
    parser.add_argument("--activation", choices=ACTIVATION_CHOICES, default="auto")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_explain)


def _factory(name: str, function: str) -> Callable[[], Any]:
    """Return the function of a module. Exit with one line if there is none."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports another one that does not
        raise SystemExit(
            f"fp4: there is no module {name!r}: MODULE is the name of a Python file in the current folder "
            "without .py, or of an installed module"
        ) from None
    found = getattr(module, function, None)
    if not callable(found):
        raise SystemExit(f"fp4: {module.__name__} ({module.__file__}) has no function {function!r}")
    made: Callable[[], Any] = found
    return made


def _explain(args: argparse.Namespace) -> None:
    from .explain import explain

    name, _, function = args.factory.partition(":")
    if not function:
        raise SystemExit(f"fp4: {args.factory!r} is not of the form MODULE:FACTORY")
    sys.path.insert(0, "")  # as `python -m` itself does
    made = _factory(name, function)()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[1], (tuple, list)):
        raise SystemExit(f"fp4: {args.factory} must return (model, args) or (model, args, kwargs)")
    model, inputs, kwargs = (*made, {})[:3]
    if isinstance(model, torch.nn.Module):
        model.eval()
    options = {"format": args.format, "activation": args.activation}
    report = explain(model, *inputs, options=options, **kwargs)
    print(json.dumps(report.to_dict(), indent=1) if args.json else report)
