"""Reads folders that the tools themselves write: `make test-tools`.

Each tool is installed from PyPI into its own folder and runs in its own process, on tiny random models. The
families for the slower schemes are chosen at random; FP4_TOOLS=all takes all.
"""

from __future__ import annotations

import random
import re

import cases
import pytest
import reading
import torch
from cases import Case
from checkpoint_folders import outputs
from conftest import SEED
from installs import CannotInstall

import fp4_ops
from fp4_ops.checkpoints import CheckpointError
from fp4_ops.checkpoints.families import model_class
from fp4_ops.integrations.transformers.quantizer import registered

CASES = [
    pytest.param(
        case, id=str(case), marks=[pytest.mark.xdist_group(maker), pytest.mark.drawn_together(maker)]
    )
    for maker in cases.names()
    for case in cases.cases(maker, SEED)
]
pytestmark = pytest.mark.tools
IDS = torch.randint(0, 128, (1, 5), generator=torch.Generator().manual_seed(1))


def read(case: Case, chosen: tuple[Case, ...] = ()) -> str:
    """Returns the outcome for a folder: "exact", "folded", "refused", or "refused, or quantised anew".

    chosen: the cases that are read, if not all."""
    where, _ = cases.written(case, SEED, chosen)
    scheme = cases.load(case.maker).schemes[case.scheme]
    folder, options = where / "folder", {}
    original = _original(where / "original")
    refused = dict(scheme.but).get(case.family, scheme.refused)
    outcome = "exact"
    if refused:
        with pytest.raises(CheckpointError) as error:
            fp4_ops.load_checkpoint(None, folder)
        assert re.search(refused, str(error.value)), error.value
        if not scheme.requantize:
            return f"refused: {refused.replace(chr(92), '')}"
        options, outcome = {"requantize": scheme.requantize}, "refused, or quantised anew"
    model = fp4_ops.load_checkpoint(None, folder, **options)
    assert reading.check(model, original, folder, scheme.far, bool(options)) > 0
    if model.hf_quantizer.report.folds.rounded:
        assert scheme.rounded, model.hf_quantizer.report
        outcome = "folded"
    logits = outputs(model, IDS)
    assert logits.isfinite().all()
    if not options and (cases.ALL or random.Random(f"{SEED} {case}").random() < 0.3):
        with registered():
            again = model_class(model.config).from_pretrained(folder)
        assert torch.equal(outputs(again, IDS), logits)
    return outcome


def _original(path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    return model_class(config).from_pretrained(path, config=config, dtype=torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_tools(case: Case, request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if item.function is test_tools]
    given = [item.callspec.params["case"] for item in items]  # by --draw, or -k
    try:
        read(case, tuple(other for other in given if other.maker == case.maker))
    except CannotInstall as why:
        pytest.skip(f"{cases.load(case.maker).name} cannot be had: {why}")
