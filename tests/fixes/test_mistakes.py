# SPDX-License-Identifier: Apache-2.0
"""A patch with a mistake in it does not pass its proof.

Needs torch (CPU) and the megatron-core packages, which are fetched once into the cache. Real DistributedDataParallel,
schedules and optimizers, real gloo process groups.
"""

from __future__ import annotations

import pytest

from megatron_fixes import catalog
from megatron_fixes.proofs.__main__ import run_parent, variant_tree

BUFFER = "megatron/core/distributed/param_and_grad_buffer.py"
STREAM_WAIT = "self.communication_stream.wait_stream(torch.cuda.current_stream())"
FLAG = "self.grad_reduce_dispatched = self.ddp_config.overlap_grad_reduce"
START = "        if self.is_first_batch and (\n"
STATE = "megatron/core/parallel_state.py"
DESTROY = "                torch.distributed.destroy_process_group(group)\n"
BEFORE = "before = set(torch.distributed.distributed_c10d._world.pg_map)"
WARNING = 'logger.warning("Could not destroy process group %s", description, exc_info=True)'
OPTIMIZER = "megatron/core/optimizer/optimizer.py"
FOUND = "                found_inf_flag |= optimizer.prepare_grads()\n"
UPDATE = "            scaler.update(found_inf_flag)\n"
LOWEST = "min(state[key] for state in states)"
DRAIN = '        RuntimeError if the ranks didn\'t all abandon it at the same point.\n        """\n'
DDP = "megatron/core/distributed/distributed_data_parallel.py"

# Fix, file, what is right in it, what is wrong.
MISTAKES = {
    "waits for itself": (
        "MF0001",
        BUFFER,
        STREAM_WAIT,
        "self.communication_stream.wait_stream(self.communication_stream)",
    ),
    "waits only before": (
        "MF0001",
        BUFFER,
        "torch.cuda.current_stream().wait_stream(self.communication_stream)",
        "pass",
    ),
    "waits the wrong way": (
        "MF0001",
        BUFFER,
        STREAM_WAIT,
        "torch.cuda.current_stream().wait_stream(self.communication_stream)",
    ),
    "never reduces": (
        "MF0001",
        BUFFER,
        STREAM_WAIT,
        STREAM_WAIT + "\n            return",
    ),
    "remembers without overlap too": ("MF0003", BUFFER, FLAG, "self.grad_reduce_dispatched = True"),
    "remembers nothing": ("MF0003", BUFFER, FLAG, "self.grad_reduce_dispatched = False"),
    "never reduces with one instance": (
        "MF0003",
        BUFFER,
        START,
        "        if self.ddp_config.num_distributed_optimizer_instances == 1:\n            return\n" + START,
    ),
    "waits for no handle": ("MF0002", DDP, "                bucket_group.grad_reduce_handle.wait()\n", ""),
    "keeps the handle": ("MF0002", DDP, "                bucket_group.grad_reduce_handle = None\n", ""),
    "asks no other rank": ("MF0002", DDP, "                self._check_all_ranks_abandoned_step(group)\n", ""),
    "takes the word of any point": ("MF0002", DDP, "{group.group_name}/{issued}", "{group.group_name}"),
    "asks itself only": ("MF0002", DDP, "store.wait(list(keys.values()),", "store.wait([own_key],"),
    "swallows that ranks are apart": ("MF0002", DDP, "            store.delete_key(own_key)\n", "            return\n"),
    "leaves out experts": (
        "MF0002",
        DDP,
        DRAIN + "        for bucket_group in self.bucket_groups + self.expert_parallel_bucket_groups:\n",
        DRAIN + "        for bucket_group in self.bucket_groups:\n",
    ),
    "lets the reduction wait for zeroing": (
        "MF0002",
        DDP,
        "torch.cuda.current_stream().wait_stream(bucket_group.communication_stream)",
        "bucket_group.communication_stream.wait_stream(torch.cuda.current_stream())",
    ),
    "counts in a batch that was abandoned": (
        "MF0004",
        BUFFER,
        "        if self.golden_per_param_grad_ready_counts:\n",
        "        if len(self.per_param_grad_ready_counts) == len(self.params) and self.is_first_batch:\n"
        "            self.golden_per_param_grad_ready_counts = self.per_param_grad_ready_counts\n",
    ),
    "counts in a batch with parameters unused": (
        "MF0004",
        BUFFER,
        "            if all_grads_ready:\n",
        "            if self.per_param_grad_ready_counts:\n",
    ),
    "never counts": ("MF0004", BUFFER, "            self.is_first_batch = False\n", "            pass\n"),
    "dispatches what is dispatched": (
        "MF0004",
        BUFFER,
        "if not self.ddp_config.overlap_grad_reduce or self.grad_reduce_dispatched:",
        "if not self.ddp_config.overlap_grad_reduce:",
    ),
    "leaves fewer passes undispatched": (
        "MF0004",
        BUFFER,
        "        elif all_grads_ready and not self.grad_reduce_finished:\n",
        "        elif False:\n",
    ),
    "dispatches the rest in the order of buckets": (
        "MF0004",
        DDP,
        "sorted(bucket_groups, key=lambda group: group.last_grad_ready_ns)",
        "bucket_groups",
    ),
    "takes late gradients": (
        "MF0004",
        BUFFER,
        "        if self.grad_reduce_dispatched:\n            self.grad_came_late = True\n",
        "        if False:\n            self.grad_came_late = True\n",
    ),
    "refuses gradients after the end": (
        "MF0004",
        BUFFER,
        "        self.grad_reduce_dispatched = False\n        self.grad_reduce_finished = not self.is_first_batch\n",
        "        self.grad_reduce_finished = not self.is_first_batch\n",
    ),
    "forgets that a gradient came late": (
        "MF0004",
        BUFFER,
        "            self.grad_came_late = True\n",
        "            pass\n",
    ),
    "counts anew in one bucket group only": (
        "MF0004",
        DDP,
        "            for bucket_group in bucket_groups:\n                bucket_group.golden",
        "            for bucket_group in bucket_groups[:1]:\n                bucket_group.golden",
    ),
    "destroys each twice": ("MF0005", STATE, DESTROY, DESTROY + DESTROY),
    "destroys the oldest first": ("MF0005", STATE, "_model_parallel_groups.pop()", "_model_parallel_groups.pop(0)"),
    "destroys what is destroyed": (
        "MF0005",
        STATE,
        "if group in torch.distributed.distributed_c10d._world.pg_map:",
        "if True:",
    ),
    "destroys what others made": ("MF0005", STATE, BEFORE, "before = {torch.distributed.group.WORLD}"),
    "destroys the default group": ("MF0005", STATE, BEFORE, "before = set()"),
    "leaves the names": ("MF0005", STATE, "if value is group]:", "if value is globals]:"),
    "leaves what a failed initialisation made": (
        "MF0005",
        STATE,
        "            return initialize(*args, **kwargs)\n        finally:\n",
        "            initialize(*args, **kwargs)\n        except ImportError:\n            raise\n        else:\n",
    ),
    "leaves the list of the timeouts": (
        "MF0005",
        STATE,
        "    global _global_process_group_list\n    _global_process_group_list = None\n",
        "",
    ),
    "stops after an error": ("MF0005", STATE, WARNING, WARNING + "\n            return"),
    "says nothing of an error": ("MF0005", STATE, WARNING, "pass"),
    "lets an error out": ("MF0005", STATE, WARNING, "raise"),
    "keeps what DTensor knows": ("MF0005", STATE, ".propagate_op_sharding.cache.cache_clear()", ""),
    "keeps what DTensor's fast path knows": (
        "MF0005",
        STATE,
        "_clear_DTensor_sharding_propagator_cache",
        "_clear_nothing",
    ),
    "counts an overflow only if all have one": (
        "MF0006",
        OPTIMIZER,
        FOUND,
        "                one = optimizer.prepare_grads()\n"
        "                found_inf_flag = one and (found_inf_flag or optimizer is self.chained_optimizers[0])\n",
    ),
    "counts the last overflow only": ("MF0006", OPTIMIZER, FOUND, FOUND.replace("|=", "=")),
    "updates twice": ("MF0006", OPTIMIZER, UPDATE, UPDATE + UPDATE),
    "updates never": ("MF0006", OPTIMIZER, UPDATE, "            pass\n"),
    "updates the first only": (
        "MF0006",
        OPTIMIZER,
        "        for scaler in scalers:\n" + UPDATE,
        "        for scaler in scalers[:1]:\n" + UPDATE,
    ),
    "updates a shared one twice": ("MF0006", OPTIMIZER, "elif self.grad_scaler not in waiting:", "else:"),
    "updates while others still unscale": (
        "MF0006",
        OPTIMIZER,
        "                waiting.append(self.grad_scaler)\n",
        "                waiting.append(self.grad_scaler)\n                self.grad_scaler.update(found_inf_flag)\n",
    ),
    "does not let go of an optimizer": (
        "MF0006",
        OPTIMIZER,
        "                optimizer.scalers_waiting_for_update = None\n",
        "                pass\n",
    ),
    "lets go only after a good step": (
        "MF0006",
        OPTIMIZER,
        "            finally:\n                optimizer.scalers_waiting_for_update = None\n",
        "            except ZeroDivisionError:\n                raise\n"
        "            else:\n                optimizer.scalers_waiting_for_update = None\n",
    ),
    "loads the highest": ("MF0006", OPTIMIZER, LOWEST, LOWEST.replace("min", "max")),
    "loads the first": ("MF0006", OPTIMIZER, LOWEST, "states[0][key]"),
    "loads the last": ("MF0006", OPTIMIZER, LOWEST, "states[-1][key]"),
    "loads one scale and several counts": (
        "MF0006",
        OPTIMIZER,
        "for key in states[0]})",
        "for key in ['scale']} | {k: v for k, v in scaler.state_dict().items() if k != 'scale'})",
    ),
    "loads into the first only": (
        "MF0006",
        OPTIMIZER,
        "        for scaler in scalers:\n            scaler.load",
        "        for scaler in scalers[:1]:\n            scaler.load",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_patch_with_a_mistake_in_it_does_not_pass(mistake: str) -> None:
    fix_id, file, right, wrong = MISTAKES[mistake]
    with variant_tree(catalog.load(), "0.16.1", "patched", [fix_id]) as tree:
        path = tree / file
        text = path.read_text("utf-8")
        assert text.count(right) == 1
        path.write_text(text.replace(right, wrong), "utf-8")
        (result,) = run_parent(tree, "gloo", [fix_id], briefly=True)
    assert result["outcome"] != "clean", result["evidence"]
