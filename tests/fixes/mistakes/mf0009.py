# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0009 could have: file, what is right in it, what is wrong."""

STATE = "megatron/core/parallel_state.py"
GLOO = 'ranks, timeout=timeout, backend="gloo", group_desc="EXPERT_DATA_PARALLEL_GROUP_GLOO"'
HYBRID = "                ranks[i : i + group_size],\n                timeout=timeout,\n"
CALL = 'rank, ranks_with_cp, get_nccl_options("dp_cp", nccl_comm_cfgs), timeout=timeout\n'

MISTAKES = {
    "forgets the experts' gloo group": (STATE, GLOO, GLOO.replace("timeout=timeout, ", "")),
    "gives the experts' gloo group minutes as seconds": (
        STATE,
        GLOO,
        GLOO.replace("timeout=timeout", "timeout=timedelta(seconds=distributed_timeout_minutes)"),
    ),
    "forgets the hybrid groups": (STATE, HYBRID, HYBRID.replace("                timeout=timeout,\n", "")),
    "does not hand the timeout on": (STATE, CALL, CALL.replace(", timeout=timeout", "")),
}
