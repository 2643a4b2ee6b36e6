# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0005 could have: file, what is right in it, what is wrong."""

STATE = "megatron/core/parallel_state.py"
DESTROY = "                torch.distributed.destroy_process_group(group)\n"
BEFORE = "before = set(torch.distributed.distributed_c10d._world.pg_map)"
WARNING = 'logger.warning("Could not destroy process group %s", description, exc_info=True)'

MISTAKES = {
    "destroys each twice": (STATE, DESTROY, DESTROY + DESTROY),
    "destroys the oldest first": (STATE, "_model_parallel_groups.pop()", "_model_parallel_groups.pop(0)"),
    "destroys what is destroyed": (STATE, "if group in torch.distributed.distributed_c10d._world.pg_map:", "if True:"),
    "destroys what others made": (STATE, BEFORE, "before = {torch.distributed.group.WORLD}"),
    "destroys the default group": (STATE, BEFORE, "before = set()"),
    "leaves the names": (STATE, "if value is group]:", "if value is globals]:"),
    "leaves what a failed initialisation made": (
        STATE,
        "            return initialize(*args, **kwargs)\n        finally:\n",
        "            initialize(*args, **kwargs)\n        except ImportError:\n            raise\n        else:\n",
    ),
    "leaves the list of the timeouts": (
        STATE,
        "    global _global_process_group_list\n    _global_process_group_list = None\n",
        "",
    ),
    "stops after an error": (STATE, WARNING, WARNING + "\n            return"),
    "says nothing of an error": (STATE, WARNING, "pass"),
    "lets an error out": (STATE, WARNING, "raise"),
    "keeps what DTensor knows": (STATE, ".propagate_op_sharding.cache.cache_clear()", ""),
    "keeps what DTensor's fast path knows": (STATE, "_clear_DTensor_sharding_propagator_cache", "_clear_nothing"),
}
