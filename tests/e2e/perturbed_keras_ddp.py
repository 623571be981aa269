"""Run the keras_ddp template with the weights of one rank spoiled, so that a test sees the run fail.

Usage, in place of the template's script: ``perturbed_keras_ddp.py [ARGS OF THE TEMPLATE]``. The rank is
``PERTURB_RANK`` (default 1), the template's script ``PERTURB_SCRIPT`` (default: the repository's).
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import torch

TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "keras_ddp" / "train.py"


class SpoiltAdamW(torch.optim.AdamW):
    """AdamW whose steps on one rank leave the last bit of one weight different."""

    def step(self, closure=None):
        loss = super().step(closure)
        if int(os.environ.get("RANK", "0")) == int(os.environ.get("PERTURB_RANK", "1")):
            with torch.no_grad():
                weight = self.param_groups[0]["params"][0].view(-1)
                weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf, device=weight.device))
        return loss


torch.optim.AdamW = SpoiltAdamW
runpy.run_path(os.environ.get("PERTURB_SCRIPT", str(TEMPLATE)), run_name="__main__")
