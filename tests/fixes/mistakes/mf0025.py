# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0025 could have: file, what is right in it, what is wrong."""

OPTIMIZER = "megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py"
WAIT = "            torch.cuda.current_stream().wait_stream(self._d2h_stream)\n"
STEP = "            self.gpu_optimizer.step(closure)\n"

MISTAKES = {
    "waits for the stream of the parameters": (OPTIMIZER, WAIT, WAIT.replace("d2h", "h2d")),
    "waits the wrong way": (
        OPTIMIZER,
        WAIT,
        "            self._d2h_stream.wait_stream(torch.cuda.current_stream())\n",
    ),
    "waits after the step": (OPTIMIZER, WAIT + STEP, STEP + WAIT),
    "does not step": (OPTIMIZER, STEP, ""),
}
