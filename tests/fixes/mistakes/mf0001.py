# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0001 could have: file, what is right in it, what is wrong."""

BUFFER = "megatron/core/distributed/param_and_grad_buffer.py"
STREAM_WAIT = "self.communication_stream.wait_stream(torch.cuda.current_stream())"

MISTAKES = {
    "waits for itself": (BUFFER, STREAM_WAIT, "self.communication_stream.wait_stream(self.communication_stream)"),
    "waits only before": (BUFFER, "torch.cuda.current_stream().wait_stream(self.communication_stream)", "pass"),
    "waits the wrong way": (BUFFER, STREAM_WAIT, "torch.cuda.current_stream().wait_stream(self.communication_stream)"),
    "never reduces": (BUFFER, STREAM_WAIT, STREAM_WAIT + "\n            return"),
}
